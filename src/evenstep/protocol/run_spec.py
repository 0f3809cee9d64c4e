"""The description of a run that its workers send to the servers."""

from dataclasses import dataclass
from typing import Annotated, Final, Self, TypeAlias, final

import msgspec
import numpy as np
from msgspec import Meta

from evenstep.core.errors import ConfigError
from evenstep.core.values import Problem
from evenstep.protocol.layout import Layout
from evenstep.protocol.optimizer import OptimizerSpec
from evenstep.schemes import Scheme, in_batches, parse_scheme

MAX_BYTES: Final = 2**26
"""The most bytes of the description of a run."""

_Size: TypeAlias = Annotated[int, Meta(ge=1, le=2**62)]


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    scheme: str
    global_batch_size: _Size
    minimum: list[_Size]
    maximum: list[_Size]
    multiple: _Size
    length: _Size
    drop_last: bool
    layout: Layout
    optimizers: tuple[OptimizerSpec, ...]
    costs: str | None = None
    steps_on: _Size | None = None


_DECODER: Final = msgspec.json.Decoder(_Record)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """A run, which all workers describe in the same way.

    `length` is the number of samples in an epoch. With `drop_last`, an incomplete last global batch is left out.
    `costs`: a checksum of the samples' costs; None if all cost alike.
    """

    scheme: Scheme
    problem: Problem
    length: int
    drop_last: bool
    layout: Layout
    optimizers: tuple[OptimizerSpec, ...]
    costs: str | None = None

    def encode(self) -> bytes:
        """Encode as JSON."""
        return msgspec.json.encode(
            _Record(
                scheme=self.scheme.name,
                global_batch_size=self.problem.global_batch_size,
                minimum=self.problem.minimum.tolist(),
                maximum=self.problem.maximum.tolist(),
                multiple=self.problem.multiple,
                length=self.length,
                drop_last=self.drop_last,
                layout=self.layout,
                optimizers=self.optimizers,
                costs=self.costs,
                steps_on=self.scheme.micro_batch,
            )
        )

    @classmethod
    def decode(cls, text: bytes, workers: int) -> Self:
        """Read a description; ConfigError if it does not describe a run with this number of workers."""
        try:
            record = _DECODER.decode(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"invalid description of a run ({error}): install the same version of evenstep everywhere"
            ) from error
        if len(record.minimum) != workers or len(record.maximum) != workers:
            raise ConfigError(f"invalid batch-size limits for {workers} workers: give one of each for every worker")
        scheme = parse_scheme(record.scheme, imports=False)
        return cls(
            scheme=scheme if record.steps_on is None else in_batches(scheme, record.steps_on),
            problem=Problem(
                global_batch_size=record.global_batch_size,
                minimum=np.array(record.minimum, dtype=np.int64),
                maximum=np.array(record.maximum, dtype=np.int64),
                multiple=record.multiple,
            ),
            length=record.length,
            drop_last=record.drop_last,
            layout=record.layout,
            optimizers=record.optimizers,
            costs=record.costs,
        )

    def difference(self, others: Self) -> str:
        """Return the first difference from the description of other workers, in words, with both values."""
        mine, theirs = self._in_words(), others._in_words()
        for what in mine | theirs:
            if mine.get(what) != theirs.get(what):
                return f"{what} is {mine.get(what)} where the others have {theirs.get(what)}"
        return "description of the run has another order than that of the other workers"

    def _in_words(self) -> dict[str, object]:
        groups = [group for spec in self.optimizers for group in spec.groups]
        return {
            "scheme": self.scheme.name,
            "global batch size": self.problem.global_batch_size,
            "dataset's length": self.length,
            "checksum of costs": self.costs,
            **{
                f"parameter {each.name!r}": f"{each.dtype} of shape {list(each.shape)}"
                for each in self.layout.parameters
            },
            **{f"optimizer {number}": spec.name for number, spec in enumerate(self.optimizers)},
            **{
                f"{'learning rate' if name == 'lr' else name} in param group {number}": value
                for number, group in enumerate(groups)
                for name, value in group.items()
            },
        }
