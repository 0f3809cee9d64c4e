"""What the time of a run behind a barrier went on, and what its sizes gained, in running totals."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Final, TypeAlias, final

import numpy as np
import numpy.typing as npt

from evenstep.core.values import Basis
from evenstep.report.account.comparisons import Comparisons, Interval

FloatArray: TypeAlias = npt.NDArray[np.float64]

_WARM_UP: Final = 1
"""Iterations at the start of a run that say nothing about its speed."""
_MIN_ITERATIONS: Final = 3


@final
class Cause(StrEnum):
    """Why a worker is late, or all are."""

    COMPUTE = "compute"
    INPUT = "input"
    SCRIPT = "script"
    COMMUNICATION = "communication"


OWN: Final = (Cause.COMPUTE, Cause.INPUT, Cause.SCRIPT)
"""What a worker does for itself between two meetings, in the order of `Meetings.own`."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Meetings:
    """Consecutive iterations in which all workers met; in seconds, of shape [workers, iterations] unless noted.

    `own`, of shape [parts, workers, iterations], is what each worker did for itself since the last meeting, in the
    order of `OWN`. All workers leave a meeting together, so the others wait for the worker with the largest sum.
    `seconds`, of shape [iterations], is the whole iteration, and `bases` says why each iteration has its sizes.
    """

    samples: FloatArray
    own: FloatArray
    wait: FloatArray
    comm: FloatArray
    seconds: FloatArray
    bases: tuple[Basis, ...]

    def blame(self) -> FloatArray:
        """Seconds that all waited for each worker, by cause; shape [workers, parts].

        The cause is the part in which the latest worker exceeds the median most.
        """
        numbers = np.arange(len(self.seconds))
        latest = self.own.sum(axis=0).argmax(axis=0)
        excess = self.own[:, latest, numbers] - np.median(self.own, axis=1)
        blame = np.zeros((self.own.shape[1], len(OWN)))
        np.add.at(blame, (latest, excess.argmax(axis=0)), self.wait.sum(axis=0))
        return blame

    def without_input(self) -> FloatArray:
        """The iterations' seconds if no worker had waited for its input; shape [iterations]."""
        compute, inputs, script = self.own
        late = (compute + inputs + script).max(axis=0) - (compute + script).max(axis=0)
        return np.asarray(self.seconds - late)

    def stretches(self) -> list[slice]:
        """The longest stretches of iterations with the same sizes and the same basis."""
        if not len(self.seconds):
            return []
        changes = (np.diff(self.samples, axis=1) != 0).any(axis=0)
        changes |= np.array([one != other for one, other in pairwise(self.bases)], dtype=bool)
        edges = [0, *(np.flatnonzero(changes) + 1).tolist(), len(self.seconds)]
        return [slice(start, stop) for start, stop in pairwise(edges)]


@final
class Account:
    """Takes the iterations of a run in their order, some at a time; its memory does not grow with the run.

    With local SGD, an iteration here is what lies between two meetings, but sizes are those of one iteration with
    `global_batch_size` samples.

    Attributes:
        iterations: The iterations taken.
        seconds: Their sum.
        samples: Each worker's samples, shape [workers].
        own: Each worker's seconds by `OWN`, shape [parts, workers].
        wait: Each worker's seconds of waiting for the latest worker, shape [workers].
        comm: Each worker's seconds of communication, shape [workers].
        blame: Seconds that all waited for each worker, by cause; shape [workers, parts].
        comparisons: How much faster the decided sizes are than equal ones.
    """

    def __init__(self, workers: int, global_batch_size: int) -> None:
        self.iterations = 0
        self.seconds = 0.0
        self.samples: FloatArray = np.zeros(workers)
        self.own: FloatArray = np.zeros((len(OWN), workers))
        self.wait: FloatArray = np.zeros(workers)
        self.comm: FloatArray = np.zeros(workers)
        self.blame: FloatArray = np.zeros((workers, len(OWN)))
        self.comparisons = Comparisons()
        self._batch = global_batch_size
        self._first_sizes: FloatArray = np.zeros(workers)
        self._last_sizes: FloatArray = np.zeros(workers)
        self._whole = 0.0
        # Waiting and all time of iterations with equal sizes, and with decided ones that are others.
        self._equal = np.zeros(2)
        self._decided = np.zeros(2)
        # Iterations with about equal sizes, and every worker's compute seconds and samples in them.
        self._even_iterations = 0
        self._even: FloatArray = np.zeros((2, workers))

    @property
    def workers(self) -> int:
        """The number of workers."""
        return len(self.samples)

    def take(self, meetings: Meetings) -> None:
        """Add some iterations."""
        times = np.stack([meetings.seconds, meetings.without_input()], axis=1).tolist()
        for stretch in meetings.stretches():
            self._take_stretch(meetings, times, stretch)
        self.iterations += len(meetings.seconds)
        self.seconds += float(meetings.seconds.sum())
        self.samples += meetings.samples.sum(axis=1)
        self.own += meetings.own.sum(axis=2)
        self.wait += meetings.wait.sum(axis=1)
        self.comm += meetings.comm.sum(axis=1)
        self.blame += meetings.blame()

    @property
    def waiting(self) -> float:
        """The part of all workers' seconds in which they waited for the latest worker, 0 to 1."""
        return float(self.wait.mean()) / self.seconds if self.seconds else 0.0

    @property
    def first_sizes(self) -> tuple[int, ...]:
        """All workers' batch sizes in the first iteration; 0 before it."""
        return self._shown(self._first_sizes)

    @property
    def last_sizes(self) -> tuple[int, ...]:
        """All workers' batch sizes as decided last."""
        return self._shown(self._last_sizes)

    @property
    def waiting_share(self) -> float:
        """The share of all workers' time that was waiting, 0 to 1."""
        return float(self.wait.sum()) / self._all_time

    @property
    def communication_share(self) -> float:
        """The share of all workers' time that was communication, 0 to 1."""
        return float(self.comm.sum()) / self._all_time

    @property
    def blame_shares(self) -> FloatArray:
        """`blame` as shares of all workers' time, 0 to 1."""
        return self.blame / self._all_time

    @property
    def waiting_before(self) -> float | None:
        """The share of the time that was waiting with equal sizes; None without such iterations."""
        return float(self._equal[0] / self._equal[1]) if self._equal[1] else None

    @property
    def waiting_after(self) -> float | None:
        """The share of the time that was waiting with decided, unequal sizes; None without such iterations."""
        return float(self._decided[0] / self._decided[1]) if self._decided[1] else None

    @property
    def speed_up(self) -> Interval | None:
        """How many times as fast the run was as with equal sizes only, 1 if it had no others; None if unknown."""
        if not self._decided[1]:
            return Interval(low=1.0, estimate=1.0, high=1.0) if self._equal[1] else None
        return self.comparisons.speed_up(self.seconds)

    def slowdowns(self) -> dict[int, float]:
        """Each worker's seconds per sample over the median of the others', at equal sizes; empty if unknown."""
        iterations = self._even_iterations
        paces = self._even[0] / np.maximum(self._even[1], 1.0) * iterations
        for stands_for, measured in self.comparisons.paces():
            paces = paces + measured * stands_for
            iterations += stands_for
        if iterations < _MIN_ITERATIONS or not (paces > 0).all():
            return {}
        return over_others(paces)

    @property
    def _all_time(self) -> float:
        return max(self.seconds * self.workers, 1e-12)

    def _shown(self, sizes: FloatArray) -> tuple[int, ...]:
        scale = self._batch / max(self._whole, self._batch, 1.0)
        return tuple(round(size * scale) for size in sizes.tolist())

    def _take_stretch(self, meetings: Meetings, times: list[list[float]], stretch: slice) -> None:
        """Add iterations that have the same sizes, with the same basis."""
        number = self.iterations + stretch.start
        sizes = meetings.samples[:, stretch.start]
        whole, basis = float(sizes.sum()), meetings.bases[stretch.start]
        if not self._whole:
            self._first_sizes = self._last_sizes = sizes
        self._whole = max(whole, self._whole)
        stretch = slice(stretch.start + max(_WARM_UP - number, 0), stretch.stop)
        if stretch.start >= stretch.stop:
            return
        if whole < self._whole:  # The short last slice of an epoch.
            if basis == "speed":
                self.comparisons.add_short(tuple(sizes.tolist()), meetings.seconds[stretch].tolist())
            return
        time = np.array([meetings.wait[:, stretch].sum(), meetings.seconds[stretch].sum() * len(sizes)])
        taken = [(seconds, busy) for seconds, busy in times[stretch]]
        compute = meetings.own[0][:, stretch]
        if basis == "speed":
            self._take_decided(sizes, taken, time, compute.sum(axis=1))
        else:
            self._equal += time
            self.comparisons.add_equal(taken, compute.mean(axis=1) / np.maximum(sizes, 1.0))

    def _take_decided(
        self, sizes: FloatArray, taken: list[tuple[float, float]], time: FloatArray, compute: FloatArray
    ) -> None:
        """Add iterations whose sizes were decided from speeds; `compute`: each worker's seconds in all of them."""
        self._last_sizes = sizes
        if uneven(sizes, float(sizes.mean())):
            self._decided += time
            self.comparisons.add_decided(tuple(sizes.tolist()), taken)
        else:
            self._equal += time
            self._even_iterations += len(taken)
            self._even += [compute, sizes * len(taken)]


def uneven(sizes: FloatArray, equal: float) -> bool:
    """Whether any size differs from its equal share by more than an eighth."""
    return bool((np.abs(sizes - equal) * 8 > equal).any())


def over_others(values: FloatArray | Sequence[float]) -> dict[int, float]:
    """Each value over the median of the others; 1 without others."""
    each = np.asarray(values, dtype=np.float64)
    usual = [float(np.median(np.delete(each, index))) if len(each) > 1 else 0.0 for index in range(len(each))]
    return {index: float(each[index]) / other if other else 1.0 for index, other in enumerate(usual)}
