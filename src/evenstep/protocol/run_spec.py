"""What a run is, as its workers tell the servers: enough to decide for it and to hold its parameters."""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, cast, final

import numpy as np

from evenstep.core.errors import ConfigError
from evenstep.core.values import Problem
from evenstep.protocol.layout import Layout
from evenstep.protocol.optimizer import OptimizerSpec
from evenstep.schemes import Scheme, parse_scheme

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_BYTES = 2**26
"""The longest description of a run that a server reads."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """All workers of a run tell the same.

    `length` is the number of samples in an epoch, of which `drop_last` leaves out what fills no global batch.
    """

    scheme: Scheme
    problem: Problem
    length: int
    drop_last: bool
    layout: Layout
    optimizers: tuple[OptimizerSpec, ...]

    def encode(self) -> bytes:
        """As JSON."""
        problem = self.problem
        record = {
            "scheme": self.scheme.name,
            "global_batch_size": problem.global_batch_size,
            "minimum": problem.minimum.tolist(),
            "maximum": problem.maximum.tolist(),
            "multiple": problem.multiple,
            "length": self.length,
            "drop_last": self.drop_last,
            "layout": self.layout.to_record(),
            "optimizers": [spec.to_record() for spec in self.optimizers],
        }
        return json.dumps(record).encode()

    def difference(self, others: Self) -> str:
        """The first thing that is another in the others' description, in words; both values."""
        mine, theirs = self._in_words(), others._in_words()
        for what in mine | theirs:
            if mine.get(what) != theirs.get(what):
                return f"{what} is {mine.get(what)} where the others have {theirs.get(what)}"
        return "description of the run is in another order than the others'"

    def _in_words(self) -> dict[str, object]:
        optimizers = {f"optimizer {number}": spec.name for number, spec in enumerate(self.optimizers)}
        groups = [group for spec in self.optimizers for group in spec.groups]
        return {
            "scheme": self.scheme.name,
            "global batch size": self.problem.global_batch_size,
            "dataset's length": self.length,
            **{
                f"parameter {each.name!r}": f"{each.dtype} of shape {list(each.shape)}"
                for each in self.layout.parameters
            },
            **optimizers,
            **{
                f"{'learning rate' if name == 'lr' else name} in param group {number}": value
                for number, group in enumerate(groups)
                for name, value in group.items()
            },
        }

    @classmethod
    def decode(cls, text: bytes, workers: int) -> Self:
        """What `encode` gave, from a peer that may send anything.

        Raises:
            ConfigError: It describes no run of so many workers.
        """
        try:
            record = json.loads(text)
            limits = [np.array(record[name], dtype=np.int64) for name in ("minimum", "maximum")]
            numbers = [int(record[name]) for name in ("global_batch_size", "multiple", "length")]
            optimizers = list(cast("list[Any]", record["optimizers"]))
            scheme, layout, drop_last = str(record["scheme"]), record["layout"], bool(record["drop_last"])
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise ConfigError(
                f"a run was described by something else than its JSON ({error!r}): use one evenstep"
            ) from error
        if any(each.shape != (workers,) or (each < 1).any() for each in limits) or min(numbers) < 1:
            raise ConfigError(f"a run was described by sizes that {workers} workers cannot have: mend them")
        return cls(
            scheme=parse_scheme(scheme),
            problem=Problem(global_batch_size=numbers[0], minimum=limits[0], maximum=limits[1], multiple=numbers[1]),
            length=numbers[2],
            drop_last=drop_last,
            layout=Layout.from_record(cast("Mapping[str, object]", layout)),
            optimizers=tuple(OptimizerSpec.from_record(each) for each in optimizers),
        )
