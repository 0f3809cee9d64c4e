"""What the time of a run behind a barrier went on, and what its sizes gained."""

from collections.abc import Sequence
from typing import Final, final

import numpy as np

from evenstep.core.account.comparisons import Comparisons, Interval
from evenstep.core.account.meetings import OWN, FloatArray, Meetings
from evenstep.core.load.compared import uneven

_WARM_UP: Final = 1
"""Iterations at the beginning of a run that tell nothing of its speed."""
_ENOUGH: Final = 3


@final
class Account:
    """Takes the iterations of a run in their order, some at a time; its memory does not grow with the run.

    Where workers meet only now and then (local SGD), what lies between two meetings is an iteration here, but sizes are
    those of an iteration with `global_batch_size` samples.

    Attributes:
        iterations: The iterations taken.
        seconds: How long they took altogether.
        samples: Each worker's samples, shape [workers].
        own: Each worker's seconds by `OWN`, shape [parts, workers].
        wait: Each worker's seconds of waiting for the latest one, shape [workers].
        comm: Each worker's seconds of communication, shape [workers].
        blame: Seconds that all waited for each worker, by cause; shape [workers, parts].
        comparisons: What says how much faster the decided sizes are than equal ones.
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
        """How many workers there are."""
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
    def first_sizes(self) -> tuple[int, ...]:
        """Everybody's batch sizes in the first iteration; 0 before it."""
        return self._shown(self._first_sizes)

    @property
    def last_sizes(self) -> tuple[int, ...]:
        """Everybody's batch sizes as they were decided last."""
        return self._shown(self._last_sizes)

    @property
    def waiting_share(self) -> float:
        """The part of all workers' time that was waiting, 0 to 1."""
        return float(self.wait.sum()) / self._all_time

    @property
    def communication_share(self) -> float:
        """The part of all workers' time that was communication, 0 to 1."""
        return float(self.comm.sum()) / self._all_time

    @property
    def blame_shares(self) -> FloatArray:
        """`blame` as parts of all workers' time, 0 to 1."""
        return self.blame / self._all_time

    @property
    def waiting_before(self) -> float | None:
        """The part of the time that was waiting with equal sizes; None without iterations that tell."""
        return float(self._equal[0] / self._equal[1]) if self._equal[1] else None

    @property
    def waiting_after(self) -> float | None:
        """The part of the time that was waiting with other sizes than equal ones; None without such iterations."""
        return float(self._decided[0] / self._decided[1]) if self._decided[1] else None

    @property
    def speed_up(self) -> Interval | None:
        """How many times as fast the run was as with equal sizes all the time; None where too little tells.

        Exactly 1 where it had equal sizes all the time.
        """
        if not self._decided[1]:
            return Interval(low=1.0, estimate=1.0, high=1.0) if self._equal[1] else None
        return self.comparisons.speed_up(self.seconds)

    def slowdowns(self) -> dict[int, float]:
        """Each worker's seconds per sample over the median of the others', both measured at equal sizes.

        Empty where too few iterations had equal sizes, because seconds per sample depend on the size.
        """
        iterations = self._even_iterations
        paces = self._even[0] / np.maximum(self._even[1], 1.0) * iterations
        for stands_for, measured in self.comparisons.paces():
            paces = paces + measured * stands_for
            iterations += stands_for
        if iterations < _ENOUGH or not (paces > 0).all():
            return {}
        return over_others(paces)

    @property
    def _all_time(self) -> float:
        return max(self.seconds * self.workers, 1e-12)

    def _shown(self, sizes: FloatArray) -> tuple[int, ...]:
        scale = self._batch / max(self._whole, self._batch, 1.0)
        return tuple(round(size * scale) for size in sizes.tolist())

    def _take_stretch(self, meetings: Meetings, times: list[list[float]], stretch: slice) -> None:
        """Add iterations that have the same sizes, for the same reason."""
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
        """Add iterations whose sizes were decided from speeds; `compute` are every worker's seconds in all of them."""
        self._last_sizes = sizes
        if uneven(sizes, float(sizes.mean())):
            self._decided += time
            self.comparisons.add_decided(tuple(sizes.tolist()), taken)
        else:
            self._equal += time
            self._even_iterations += len(taken)
            self._even += [compute, sizes * len(taken)]


def over_others(values: FloatArray | Sequence[float]) -> dict[int, float]:
    """Each value over the median of the others; 1 where there is nothing to compare with."""
    each = np.asarray(values, dtype=np.float64)
    usual = [float(np.median(np.delete(each, index))) if len(each) > 1 else 0.0 for index in range(len(each))]
    return {index: float(each[index]) / other if other else 1.0 for index, other in enumerate(usual)}
