"""Which worker gives samples to which: the leader and the straggler of LB-BSP's tuner for GPU clusters."""

from dataclasses import InitVar, dataclass, field
from typing import Final, final

import numpy as np

from evenstep.core.state import Stateful
from evenstep.core.values import IntArray, Problem

_LONGEST_MICROSECONDS: Final = 2**28
_PPM: Final = 1_000_000


@final
@dataclass(slots=True)
class TimeWindow(Stateful):
    """Sums of the compute microseconds of `workers` workers, and of their squares, over `iterations` iterations.

    All comparisons are exact, in integers. An iteration of more than 268 seconds counts as one of 268, so that the
    squares of a hundred of them fit into 64 bits.
    """

    workers: InitVar[int]
    iterations: int = field(init=False, default=0)
    _sums: IntArray = field(init=False)
    _squares: IntArray = field(init=False)

    def __post_init__(self, workers: int) -> None:
        self._sums, self._squares = np.zeros((2, workers), dtype=np.int64)

    def add(self, microseconds: IntArray) -> None:
        """Take in one iteration, shape [workers]."""
        counted = np.minimum(microseconds, _LONGEST_MICROSECONDS)
        self.iterations += 1
        self._sums = self._sums + counted
        self._squares = self._squares + counted * counted

    def fastest_first(self) -> list[int]:
        """The workers by mean time, ties by index."""
        order: list[int] = np.argsort(self._sums, kind="stable").tolist()
        return order

    def longest_nanoseconds(self) -> int:
        """The mean time of the slowest worker."""
        return int(self._sums.max()) * 1000 // self.iterations

    def gap_ppm(self, slow: int, fast: int) -> int:
        """How much longer one worker's mean time is than another's, in millionths of the mean over all."""
        gap = int(self._sums[slow]) - int(self._sums[fast])
        return gap * len(self._sums) * _PPM // max(int(self._sums.sum()), 1)

    def tells_apart(self, slow: int, fast: int) -> bool:
        """Whether one worker's mean time is longer than the other's by more than noise explains.

        The difference must exceed its standard error by a factor that grows with the number of workers, because the
        slowest and the fastest of many differ by more than any two: 3.5 for four workers, 4.5 for sixteen (near the
        99 % points of the studentized range). The error is that of the two workers or of an average pair, whichever is
        larger: one odd iteration makes a worker's own error as large as the difference, and few iterations may show too
        little noise by chance.
        """
        gap = int(self._sums[slow]) - int(self._sums[fast])
        if gap <= 0:
            return False
        # As Python's integers: the products do not fit 64 bits.
        sums, squares = self._sums.astype(object), self._squares.astype(object)
        scatter = self.iterations * squares - sums * sums
        workers = len(sums)
        pair = max(scatter[slow] + scatter[fast], 2 * scatter.sum() // workers)
        tenths = 20 + 5 * workers.bit_length()
        return bool(100 * gap * gap * (self.iterations - 1) > tenths * tenths * pair)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """`samples` samples go from one worker to another, decided on these measurements.

    Attributes:
        giver: The straggler.
        taker: The leader.
        samples: How many samples, a multiple.
        gap_ppm: How much longer the giver takes than the taker, in millionths of the mean over all workers.
        longest_nanoseconds: How long the slowest worker takes.
    """

    giver: int
    taker: int
    samples: int
    gap_ppm: int
    longest_nanoseconds: int

    def meets(self, other: "Move") -> bool:
        """Whether the two have a worker in common."""
        return not {self.giver, self.taker}.isdisjoint((other.giver, other.taker))

    def made(self, sizes: IntArray, *, back: bool = False) -> IntArray:
        """The sizes after the move, or before it."""
        after = sizes.copy()
        samples = -self.samples if back else self.samples
        after[self.giver] -= samples
        after[self.taker] += samples
        return after


def find_move(window: TimeWindow, sizes: IntArray, problem: Problem, step: int) -> Move | None:
    """The move of at most `step` samples, a multiple, from the slowest worker to the fastest, of those that can.

    The straggler gives at most half of its size and keeps its minimum. The leader at most doubles its size and is the
    fastest worker whose memory has room for that. If no worker has, half as much is tried, down to one multiple.

    Returns:
        None if no slower worker can give a multiple to a faster one.
    """
    multiple = problem.multiple
    fastest_first = window.fastest_first()
    can_give = (giver for giver in reversed(fastest_first) if sizes[giver] - multiple >= problem.minimum[giver])
    giver = next(can_give, None)
    if giver is None:
        return None
    size = int(sizes[giver])
    samples = min(step, _whole(size // 2, multiple), _whole(size - int(problem.minimum[giver]), multiple))
    while samples >= multiple:
        for taker in fastest_first:
            if taker == giver:
                break
            taken = min(samples, _whole(int(sizes[taker]), multiple))
            if sizes[taker] + taken <= problem.maximum[taker]:
                return Move(
                    giver=giver,
                    taker=taker,
                    samples=taken,
                    gap_ppm=window.gap_ppm(giver, taker),
                    longest_nanoseconds=window.longest_nanoseconds(),
                )
        samples = samples // 2 // multiple * multiple
    return None


def _whole(samples: int, multiple: int) -> int:
    """In whole multiples, at least one."""
    return max(samples // multiple, 1) * multiple
