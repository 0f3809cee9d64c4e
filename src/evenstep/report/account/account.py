"""The use of time in a run behind a barrier, and the gain from its sizes, in running totals."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Final, final

import numpy as np

from evenstep.core.errors import ConfigError
from evenstep.core.values import FloatArray
from evenstep.report.account.gain import Gain
from evenstep.schemes import Scheme, bsp, parse_scheme

ALIKE: Final = 0.125
"""Sizes that differ by at most this part of an equal share are called equal: one sample of eight."""


def known_scheme(name: str) -> Scheme:
    """The scheme of this name; of one that only the script knows, the least: equal sizes behind a barrier."""
    try:
        return parse_scheme(name, imports=False)
    except ConfigError:
        return bsp()


@final
class Part(StrEnum):
    """The uses of a worker's time, in the order of an iteration; all but waiting can be why a worker is late."""

    INPUT = "input"
    COMPUTE = "compute"
    WAIT = "waiting"
    COMMUNICATION = "communication"
    SCRIPT = "script"


OWN: Final = (Part.COMPUTE, Part.INPUT, Part.SCRIPT)
"""The parts that are a worker's own between two meetings, in the order of `Meetings.own`."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Meetings:
    """Consecutive iterations in which all workers met; in seconds, of shape [workers, iterations] unless noted.

    `own`, of shape [parts, workers, iterations], is each worker's own time since the last meeting, in the order of
    `OWN`. All workers leave a meeting together, so the others wait for the worker with the largest sum. `measured`
    holds the samples to which the compute seconds belong: on a GPU, those of the iteration before, and their costs if
    samples have costs. `seconds`, of shape [iterations], is all of the time since the last meeting.
    """

    samples: FloatArray
    measured: FloatArray
    own: FloatArray
    wait: FloatArray
    comm: FloatArray
    seconds: FloatArray

    def blame(self) -> FloatArray:
        """The seconds that all waited for each worker, by cause; shape [workers, parts].

        The cause is the part in which the latest worker exceeds the median by the most.
        """
        numbers = np.arange(len(self.seconds))
        latest = self.own.sum(axis=0).argmax(axis=0)
        excess = self.own[:, latest, numbers] - np.median(self.own, axis=1)
        blame = np.zeros((self.own.shape[1], len(OWN)))
        np.add.at(blame, (latest, excess.argmax(axis=0)), self.wait.sum(axis=0))
        return blame

    def part(self, stretch: slice) -> "Meetings":
        """Some of the iterations."""
        return Meetings(**{field.name: getattr(self, field.name)[..., stretch] for field in fields(self)})


@final
class Account:
    """Accounts for the iterations of a run, in order, some at a time; its memory does not grow with the run.

    With local SGD, an iteration here spans the time between two meetings, but sizes are those of one iteration with
    `global_batch_size` samples.

    Args:
        workers: The number of workers.
        global_batch_size: In samples.
        scheme: The name of the run's scheme. With micro-batches, times are taken to be in proportion to sizes.
        elastic: Whether workers come and go, which schemes that communicate less often cannot do.

    Attributes:
        iterations: The iterations taken.
        seconds: The sum of their seconds.
        samples: Each worker's samples, shape [workers].
        own: Each worker's seconds by `OWN`, shape [parts, workers].
        wait: Each worker's seconds of waiting for the latest worker, shape [workers].
        comm: Each worker's seconds of communication, shape [workers].
        blame: Seconds that all waited for each worker, by cause; shape [workers, parts].
        gain: Compares this with equal sizes.
        global_batch_size: In samples.
    """

    def __init__(self, workers: int, global_batch_size: int, scheme: str = "", *, elastic: bool = False) -> None:
        self.elastic = elastic
        self.iterations = 0
        self.seconds = 0.0
        self.samples: FloatArray = np.zeros(workers)
        self.own: FloatArray = np.zeros((len(OWN), workers))
        self.wait: FloatArray = np.zeros(workers)
        self.comm: FloatArray = np.zeros(workers)
        self.blame: FloatArray = np.zeros((workers, len(OWN)))
        self.gain = Gain(workers, global_batch_size, proportional=known_scheme(scheme).micro_batch is not None)
        self.global_batch_size = global_batch_size
        self._first_sizes: FloatArray = np.zeros(workers)
        self._last_sizes: FloatArray = np.zeros(workers)

    @property
    def workers(self) -> int:
        """The number of workers."""
        return len(self.samples)

    def take(self, meetings: Meetings) -> None:
        """Add some iterations."""
        self.gain.take(meetings)
        self.iterations += len(meetings.seconds)
        self.seconds += float(meetings.seconds.sum())
        self.samples += meetings.samples.sum(axis=1)
        self.own += meetings.own.sum(axis=2)
        self.wait += meetings.wait.sum(axis=1)
        self.comm += meetings.comm.sum(axis=1)
        self.blame += meetings.blame()
        samples, totals = meetings.samples, meetings.samples.sum(axis=0)
        # An epoch may be shorter than the global batch; its longest slices are whole then.
        longest = min(totals.max(initial=0.0), self.global_batch_size)
        whole = np.flatnonzero(totals >= max(self._last_sizes.sum(), longest))
        if not self._first_sizes.any() and samples.size:
            self._first_sizes = self._last_sizes = samples[:, 0]
        if len(whole):
            self._last_sizes = samples[:, whole[-1]]

    @property
    def first_sizes(self) -> tuple[int, ...]:
        """All workers' batch sizes in the first iteration; 0 before it."""
        return self._shown(self._first_sizes)

    @property
    def last_sizes(self) -> tuple[int, ...]:
        """All workers' latest batch sizes, without those of the short last slice of an epoch."""
        return self._shown(self._last_sizes)

    @property
    def uneven(self) -> bool:
        """True if any of the latest sizes differs from an equal share by more than an eighth."""
        equal = self._last_sizes.mean()
        return bool((np.abs(self._last_sizes - equal) > ALIKE * equal).any())

    @property
    def waiting(self) -> float:
        """The share of all workers' time spent waiting, 0 to 1."""
        return float(self.wait.sum()) / self.all_time

    def slowdowns(self) -> dict[int, float]:
        """Each worker's seconds per sample over the median of the others', at equal sizes."""
        return over_others(self.gain.paces)

    @property
    def all_time(self) -> float:
        """The seconds of all workers together, above 0."""
        return max(self.seconds * self.workers, 1e-12)

    def _shown(self, sizes: FloatArray) -> tuple[int, ...]:
        scale = min(self.global_batch_size / max(sizes.sum(), 1.0), 1.0)
        return tuple(round(size * scale) for size in sizes.tolist())


def over_others(values: FloatArray | Sequence[float]) -> dict[int, float]:
    """Each value over the median of the others; 1 without others."""
    each = np.asarray(values, dtype=np.float64)
    usual = [float(np.median(np.delete(each, index))) if len(each) > 1 else 0.0 for index in range(len(each))]
    return {index: float(each[index]) / other if other else 1.0 for index, other in enumerate(usual)}
