"""The iterations of one worker, in columns: a run of a million iterations fits, and single ones can be looked at."""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Self, TypeAlias, final, overload

import numpy as np
import numpy.typing as npt

from evenstep.core.values import Basis
from evenstep.report.served import PushRecord

FloatArray: TypeAlias = npt.NDArray[np.float64]

_REPORT_PACE, _REPORT_FIXED = 2, 3
"""Where a row of the exchange has its predicted nanoseconds per sample and its fixed nanoseconds."""
_UNKNOWN: Final = float("nan")
BASES: Final[tuple[Basis, ...]] = ("speed", "start", "comparison")
"""Why an iteration has its sizes, by the number that its column holds."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One iteration as one worker saw it; the parts in seconds, in the order in which they happened.

    `number` counts from 0 over the whole run. Input, compute, waiting and communication make up the iteration, but for
    what the script itself does in between. On servers `wait_seconds` is how long the push was held, and `push` what
    they told of it.
    """

    number: int
    samples: int
    iteration_seconds: float
    input_seconds: float
    compute_seconds: float
    wait_seconds: float
    comm_seconds: float
    push: PushRecord | None = None


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Iterations(Sequence[Iteration]):
    """One worker's iterations in order; each column has the shape [iterations], and NaN where nothing is known.

    `began` is in seconds of the worker's clock, `basis` an index of `BASES`. `pace` is the predicted seconds per sample
    and `fixed` the fixed seconds that this worker told of itself after the iteration. `served`: of a run on parameter
    servers.
    """

    numbers: FloatArray
    began: FloatArray
    samples: FloatArray
    basis: FloatArray
    iteration_seconds: FloatArray
    input_seconds: FloatArray
    compute_seconds: FloatArray
    wait_seconds: FloatArray
    comm_seconds: FloatArray
    pace: FloatArray
    fixed: FloatArray
    staleness: FloatArray
    behind: FloatArray
    lead: FloatArray
    served: bool

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, index: int) -> Iteration: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> Iteration | Self:
        if isinstance(index, slice):
            return replace(self, **{name: getattr(self, name)[index] for name in COLUMNS})
        return Iteration(
            number=int(self.numbers[index]),
            samples=int(self.samples[index]),
            iteration_seconds=float(self.iteration_seconds[index]),
            input_seconds=float(self.input_seconds[index]),
            compute_seconds=float(self.compute_seconds[index]),
            wait_seconds=float(self.wait_seconds[index]),
            comm_seconds=float(self.comm_seconds[index]),
            push=self._push(index) if self.served else None,
        )

    def __iter__(self) -> Iterator[Iteration]:
        return (self[index] for index in range(len(self)))

    @property
    def rest_seconds(self) -> FloatArray:
        """What the script did for itself: an iteration less its input, compute, waiting and communication."""
        parts = self.input_seconds + self.compute_seconds + self.wait_seconds + self.comm_seconds
        return np.maximum(self.iteration_seconds - parts, 0.0)

    def _push(self, index: int) -> PushRecord:
        staleness, behind, lead = (float(each[index]) for each in (self.staleness, self.behind, self.lead))
        return PushRecord(
            staleness=None if np.isnan(staleness) else int(staleness),
            behind=None if np.isnan(behind) else behind,
            lead=None if np.isnan(lead) else int(lead),
        )


COLUMNS: Final = tuple(field.name for field in fields(Iterations) if field.name != "served")


@final
class IterationsBuilder:
    """Takes a worker's events `iteration` one by one; with `keep`, only about so many of the latest are held.

    Attributes:
        count: The iterations taken so far.
        samples: Their samples.
    """

    def __init__(self, *, served: bool, keep: int | None = None) -> None:
        self._columns = tuple(array("d") for _ in COLUMNS)
        self._served = served
        self._keep = keep
        self.count = 0
        self.samples = 0

    def take(self, event: Mapping[str, Any]) -> None:
        """Add one event, or nothing of it.

        Raises:
            KeyError: It lacks what every version has written.
            TypeError, ValueError: Something in it is no number, or no basis.
        """
        report = event.get("report") or (0, 0, 0, 0)
        row = (
            event["iteration"],
            event.get("at", _UNKNOWN),
            event["samples"],
            BASES.index(event.get("basis", "speed")),
            event["iteration_seconds"],
            event["input_seconds"],
            event["compute_seconds"],
            event["wait_seconds"],
            event["comm_seconds"],
            report[_REPORT_PACE] / 1e9 or _UNKNOWN,
            report[_REPORT_FIXED] / 1e9,
            event.get("staleness", _UNKNOWN),
            event.get("behind", _UNKNOWN),
            event.get("lead", _UNKNOWN),
        )
        numbers = array("d", row)
        for column, value in zip(self._columns, numbers, strict=True):
            column.append(value)
        self.count += 1
        self.samples += event["samples"]
        if self._keep is not None and len(self._columns[0]) > 2 * self._keep:
            for column in self._columns:
                del column[: -self._keep]

    def finish(self) -> Iterations:
        """What has been taken, or what is held of it."""
        columns = {name: np.array(each) for name, each in zip(COLUMNS, self._columns, strict=True)}
        return Iterations(**columns, served=self._served)
