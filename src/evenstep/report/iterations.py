"""The iterations of one worker as columns, so that a run of a million iterations fits in memory."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Final, Self, final

import numpy as np

from evenstep.core.errors import ConfigError
from evenstep.core.values import BoolArray
from evenstep.core.values import FloatArray as FloatArray
from evenstep.report.account.account import Part
from evenstep.telemetry.events import IterationDone

_AT_ONCE: Final = 256  # Events that become a block of columns together, which is faster than each alone.


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Iterations:
    """One worker's iterations in order; each column has the shape [iterations], with NaN for unknown values.

    `numbers` count from 0 over the whole run. `began` is in seconds since the run began. `measured` holds the samples
    to which the compute seconds belong: on a GPU those of the iteration before, and if samples have costs, in average
    samples. `cost` is in average samples, and so is `padding`, the part of it that is padding. On servers,
    `staleness` (versions), `behind` (global batches) and `lead` (iterations) describe the iteration's push.
    """

    numbers: FloatArray
    began: FloatArray
    samples: FloatArray
    cost: FloatArray
    padding: FloatArray
    iteration_seconds: FloatArray
    input_seconds: FloatArray
    compute_seconds: FloatArray
    wait_seconds: FloatArray
    comm_seconds: FloatArray
    staleness: FloatArray
    behind: FloatArray
    lead: FloatArray
    measured: FloatArray

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: slice | BoolArray) -> Self:
        return replace(self, **{name: getattr(self, name)[index] for name in _COLUMNS})

    @property
    def rest_seconds(self) -> FloatArray:
        """The script's own time: the iteration minus its input, compute, waiting and communication."""
        parts = self.input_seconds + self.compute_seconds + self.wait_seconds + self.comm_seconds
        return np.maximum(self.iteration_seconds - parts, 0.0)

    @property
    def parts(self) -> dict[Part, FloatArray]:
        """The seconds of each part, each of shape [iterations]."""
        return {
            Part.INPUT: self.input_seconds,
            Part.COMPUTE: self.compute_seconds,
            Part.WAIT: self.wait_seconds,
            Part.COMMUNICATION: self.comm_seconds,
            Part.SCRIPT: self.rest_seconds,
        }

    @property
    def own_parts(self) -> FloatArray:
        """Seconds from the end of one synchronisation to the start of the next, shape [parts, iterations].

        The parts are those of `evenstep.report.account.OWN`. All workers leave a synchronisation together, so the
        others wait for the worker with the largest sum.
        """
        before = np.concatenate([[0.0], self.rest_seconds])[:-1]
        return np.array([self.compute_seconds, self.input_seconds, before])

    @property
    def seconds_since_meeting(self) -> FloatArray:
        """Seconds from the end of one synchronisation to the end of the next; time after the last is the first's."""
        return np.asarray(self.iteration_seconds - self.rest_seconds + np.roll(self.rest_seconds, 1))


_COLUMNS: Final = tuple(field.name for field in fields(Iterations))


def joined(workers: Iterable[Iterations]) -> Iterations:
    """The iterations of several workers, worker after worker."""
    together = list(workers)
    return Iterations(**{name: np.concatenate([getattr(each, name) for each in together]) for name in _COLUMNS})


_RECORDED: Final = attrgetter("iteration", "at", *_COLUMNS[2:-1])
"""The event's field for each column, in order; the last column, `measured`, follows from the event's row."""


@final
class IterationsBuilder:
    """Builds columns from a worker's events, one by one; with `keep`, it holds only about that many of the latest.

    Attributes:
        count: The iterations taken so far.
        samples: The samples in them.
    """

    def __init__(self, *, keep: int | None = None) -> None:
        self._rows: list[tuple[float | None, ...]] = []
        self._blocks: deque[FloatArray] = deque(maxlen=None if keep is None else keep // _AT_ONCE + 1)
        self.count = 0
        self.samples = 0

    def take(self, event: IterationDone) -> None:
        """Add one event."""
        self._rows.append((*_RECORDED(event), _measured(event)))
        self.count += 1
        self.samples += event.samples
        if len(self._rows) == _AT_ONCE:
            self._blocks.append(_block(self._rows))
            self._rows.clear()

    def finish(self) -> Iterations:
        """Return the iterations that are held."""
        columns = np.concatenate([*self._blocks, _block(self._rows)]).T.copy()
        return Iterations(**dict(zip(_COLUMNS, columns, strict=True)))


def _block(rows: list[tuple[float | None, ...]]) -> FloatArray:
    """The rows as an array of shape [iterations, columns], with NaN for None."""
    return np.array(rows, dtype=np.float64).reshape(-1, len(_COLUMNS))


def _measured(event: IterationDone) -> float:
    """The measured samples, from a row that begins with the samples and the microseconds of an average pass."""
    if len(event.row) < 2 or not event.row[1]:
        return event.samples
    return event.row[0] * max(round(event.compute_seconds * 1e6 / event.row[1]), 1)


def true_waits(iterations: Mapping[int, Iterations]) -> dict[int, Iterations]:
    """The iterations of workers behind a barrier, in which waiting is all the time that each waited for the latest.

    A worker records as waiting how much longer the slowest one *computed*, because workers exchange nothing else. A
    worker can also be late because of its input or its script, which the others record as communication. The events of
    all workers together separate these; the sum of waiting and communication stays the same. Iterations that not all
    workers have finished are unchanged; those before the first one that all have recorded are left out.
    """
    start = max(float(done.numbers[0]) for done in iterations.values())
    iterations = {worker: done[int(np.searchsorted(done.numbers, start)) :] for worker, done in iterations.items()}
    length = min(len(done) for done in iterations.values())
    if not length:
        raise ConfigError("no iteration stands in the files of all workers: delete those of other runs or damaged ones")
    own = {worker: done[:length].own_parts.sum(axis=0) for worker, done in iterations.items()}
    latest = np.max(list(own.values()), axis=0)
    for worker, done in iterations.items():
        wait, synchronised = done.wait_seconds.copy(), done.wait_seconds + done.comm_seconds
        wait[:length] = np.minimum(latest - own[worker], synchronised[:length])
        iterations[worker] = replace(done, wait_seconds=wait, comm_seconds=synchronised - wait)
    return iterations
