"""Which worker gives samples to which: the leader and the straggler of LB-BSP's tuner for GPU clusters."""

from dataclasses import dataclass
from typing import final

from evenstep.core.load.time_window import TimeWindow
from evenstep.core.values import IntArray, Problem


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

    def made(self, sizes: IntArray) -> IntArray:
        """The sizes after the move."""
        after = sizes.copy()
        after[self.giver] -= self.samples
        after[self.taker] += self.samples
        return after

    def taken_back(self, sizes: IntArray) -> IntArray:
        """The sizes as they were before the move."""
        before = sizes.copy()
        before[self.giver] += self.samples
        before[self.taker] -= self.samples
        return before


def find_move(window: TimeWindow, sizes: IntArray, problem: Problem, step: int) -> Move | None:
    """The move of at most `step` samples, a multiple, from the slowest worker that can to the fastest that can.

    The straggler gives at most half of its size and nothing below its minimum; the leader at most doubles its size and
    is the fastest worker whose memory has room for that much. Where nobody has, half as much is tried, down to one
    multiple.

    Returns:
        None where no slower worker can give a multiple to a faster one.
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
    """As many whole multiples, and one at least."""
    return max(samples // multiple, 1) * multiple
