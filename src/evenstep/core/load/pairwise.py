"""Moves samples from the slowest worker to the fastest while that gains time: LB-BSP's tuner for GPU clusters."""

from dataclasses import dataclass, field
from typing import final

import numpy as np

from evenstep.core.load.base import LoadPolicy
from evenstep.core.load.equal import equal_sizes
from evenstep.core.load.shares import shares_of
from evenstep.core.values import Allocation, IntArray, Problem, Reports


@final
@dataclass(slots=True)
class PairwisePolicy(LoadPolicy):
    """LB-BSP's leader/straggler tuner (SoCC'20, section 3.3.2), without a profile or a model of time.

    Each worker's compute time is averaged over a window of D iterations. The straggler is the slowest worker that can
    give a step of samples, the leader the fastest that has memory for it. The step moves from one to the other. If
    sizes oscillate, the step is halved and the window doubled.

    The paper does not give the first step and window; we move a sixth of an equal share, and D is 5. It does not define
    oscillation for more than two workers; here it means that a worker which gave a step would get one of the same size,
    or the reverse. It does not say how the tuner follows a later change of speed; here a worker that moves in one
    direction for the fourth time at a halved step doubles the step again. If one multiple moves to and fro without a
    gain, the better sizes stay until the gap has grown by 5 %. A move needs a gap between the two that exceeds 2 % of
    the mean time and stands out from noise. No size is more than halved or doubled at once. The window is at most four
    times D. It leaves out the first iterations of the run, and the first one after each move, in which a device library
    chooses its kernels.

    A different global batch is divided in proportion to the present sizes, and adopted if it comes twice in a row.

    Args:
        workers: The number of workers.
        window: The number of iterations per decision, 2 or more.
        step: The number of samples that move at first; None for a sixth of an equal share.
        warmup: The number of first iterations that are not counted.
        even: A gap of no more than this, in thousandths of the mean time, is not worth a move.
        grown: A gap that has grown by this, in thousandths of the mean time, is a change of speed.
        patience: This many moves in one direction at a halved step show that the step is too small.
    """

    workers: int
    window: int = 5
    step: int | None = None
    warmup: int = 2
    even: int = 20
    grown: int = 50
    patience: int = 3
    _sizes: IntArray = field(init=False, default_factory=lambda: np.zeros(0, dtype=np.int64))
    _left_out: int = field(init=False)
    _others: int = field(init=False, default=0)  # Consecutive reports of another global batch.
    _step: int = field(init=False, default=1)  # In multiples.
    _window: int = field(init=False)
    _directions: list[int] = field(init=False, default_factory=list)  # Each worker's, at this step: taken less given.
    _former: IntArray = field(init=False, default_factory=lambda: np.zeros(0, dtype=np.int64))  # Before the last move.
    _longest: int = field(init=False, default=0)  # At these sizes, in microseconds.
    _settled: int = field(init=False, default=0)  # Up to this gap, one multiple moves no longer to and fro.
    _count: int = field(init=False, default=0)
    _sums: IntArray = field(init=False, default_factory=lambda: np.zeros((2, 0), dtype=np.int64))  # Also of squares.

    def __post_init__(self) -> None:
        self._left_out, self._window = self.warmup, self.window

    def observe(self, reports: Reports) -> None:
        """Take in one iteration; it counts if all workers report the present sizes."""
        if not np.array_equal(reports.samples, self._sizes):
            same_workers = len(reports.samples) == len(self._sizes)
            self._others += same_workers and int(reports.samples.sum()) != int(self._sizes.sum())
        elif (reports.compute_microseconds[self._sizes > 0] > 0).all():
            self._others = 0
            if self._left_out:
                self._left_out -= 1
                return
            times = np.minimum(reports.compute_microseconds, 2**28)  # So that sums of squares fit 64 bits.
            self._count += 1
            self._sums = self._sums + np.array((times, times * times))

    def allocate(self, problem: Problem) -> Allocation:
        others, whole = len(self._sizes) != problem.workers, int(self._sizes.sum()) == problem.global_batch_size
        sizes = equal_sizes(problem) if others else _fitted(self._sizes, problem)
        if not others and not whole and self._others < 2:
            return Allocation(sizes=sizes)
        if others or not whole:
            self.workers = problem.workers
            self._change(self._first_step(problem), self.window)
        if others or not np.array_equal(sizes, self._sizes):
            self._use(sizes)
        if self._count >= self._window:
            self._move(problem)
        return Allocation(sizes=self._sizes.copy())

    def _first_step(self, problem: Problem) -> int:
        share = problem.global_batch_size // problem.workers
        return max((self.step or share // 6) // problem.multiple, 1)

    def _change(self, step: int, window: int) -> None:
        self._step, self._window, self._directions = step, window, [0] * self.workers

    def _use(self, sizes: IntArray) -> None:
        """Start to measure these sizes."""
        self._left_out, self._sizes = max(self._left_out, int(bool(len(self._sizes)))), sizes
        self._count, self._others, self._sums = 0, 0, np.zeros((2, len(sizes)), dtype=np.int64)

    def _move(self, problem: Problem) -> None:
        """Move a step, change the step, or continue to measure."""
        pair = self._pair(problem)
        if pair is None or not self._stands_out(pair[0], pair[1]):
            if pair is None or self._count >= 8 * self.window:
                self._use(self._sizes)  # The measurements are out of date.
            return
        giver, taker, _ = pair
        first, longest = self._first_step(problem), int(self._sums[0].max()) // self._count
        gap = int(self._sums[0, giver] - self._sums[0, taker]) * 1000 * problem.workers // int(self._sums[0].sum())
        oscillates = self._directions[giver] > 0 or self._directions[taker] < 0
        if oscillates and self._step == 1 and gap <= self._settled:
            self._use(self._sizes if longest <= self._longest else _fitted(self._former, problem))
            return
        if oscillates:
            self._settled = gap + self.grown
            self._change(max(self._step // 2, 1), min(2 * self._window, 4 * self.window))
        elif self._step < first and max(-self._directions[giver], self._directions[taker]) >= self.patience:
            self._change(min(2 * self._step, first), max(self._window // 2, self.window))
        giver, taker, samples = self._pair(problem) or pair
        self._directions[giver] -= 1
        self._directions[taker] += 1
        self._former, self._longest, sizes = self._sizes, longest, self._sizes.copy()
        sizes[giver] -= samples
        sizes[taker] += samples
        self._use(sizes)

    def _pair(self, problem: Problem) -> tuple[int, int, int] | None:
        """The straggler, the leader and the number of samples to move, at most a step; None if none can move."""
        multiple, sizes = problem.multiple, self._sizes
        fastest_first: list[int] = np.argsort(self._sums[0], kind="stable").tolist()
        for giver in reversed(fastest_first):
            own = min(int(sizes[giver]) // 2, int(sizes[giver] - problem.minimum[giver])) // multiple
            while own:
                for taker in fastest_first[: fastest_first.index(giver)]:
                    moved = min(own, self._step, max(int(sizes[taker]) // multiple, 1)) * multiple
                    if sizes[taker] + moved <= problem.maximum[taker]:
                        return giver, taker, moved
                own //= 2  # No faster worker has memory for this many.
        return None

    def _stands_out(self, slow: int, fast: int) -> bool:
        """True if one worker's mean time exceeds the other's by 2 % of the mean, and by more than noise.

        The gap must exceed its standard error by a factor that grows with the number of workers, since the slowest and
        the fastest of many differ by more than any two: 3.5 for four, 4.5 for sixteen (near the 99 % points of the
        studentized range). The error is the larger one of this pair's and an average pair's.
        """
        sums, squares = self._sums.astype(object)
        gap, scatter, workers = sums[slow] - sums[fast], self._count * squares - sums * sums, len(sums)
        if gap * workers * 1000 <= self.even * sums.sum():
            return False
        pair = max(scatter[slow] + scatter[fast], 2 * scatter.sum() // workers)
        tenths = 20 + 5 * workers.bit_length()
        return bool(100 * gap * gap * (self._count - 1) > tenths * tenths * pair)


def _fitted(sizes: IntArray, problem: Problem) -> IntArray:
    """The sizes if they satisfy the problem, else those closest to them in proportion."""
    within = (sizes >= problem.minimum) & (sizes <= problem.maximum) & (sizes % problem.multiple == 0)
    return sizes if within.all() and int(sizes.sum()) == problem.global_batch_size else shares_of(problem, sizes)
