"""Every worker's mean compute time over a window of iterations, and whether two of them can be told from noise."""

from typing import Final, Self, cast, final

import numpy as np

from evenstep.core.values import IntArray, State

_LONGEST_MICROSECONDS: Final = 2**28
_PPM: Final = 1_000_000


@final
class TimeWindow:
    """Sums of the compute microseconds of `workers` workers, and of their squares, over `iterations` iterations.

    All comparisons are exact, in integers. An iteration of more than 268 seconds counts as one of 268, so that the
    squares of a hundred of them fit into 64 bits.
    """

    __slots__ = ("_squares", "_sums", "iterations")

    def __init__(self, workers: int) -> None:
        self.iterations = 0
        self._sums: IntArray = np.zeros(workers, dtype=np.int64)
        self._squares: IntArray = np.zeros(workers, dtype=np.int64)

    @classmethod
    def from_state(cls, state: State) -> Self:
        """The window that `state_dict` was taken of."""
        window = cls(0)
        window.iterations = cast("int", state["iterations"])
        window._sums = np.array(state["sums"], dtype=np.int64)
        window._squares = np.array(state["squares"], dtype=np.int64)
        return window

    @property
    def workers(self) -> int:
        """How many workers it is over."""
        return len(self._sums)

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
        return gap * self.workers * _PPM // max(int(self._sums.sum()), 1)

    def tells_apart(self, slow: int, fast: int) -> bool:
        """Whether the one's mean time is longer than the other's by more than noise explains.

        The difference must exceed its standard error by a factor that grows with the number of workers, since the
        slowest and the fastest of many differ by more than any two: 3.5 for four workers, 4.5 for sixteen (near the
        99 % points of the studentized range). The error is that of the two workers or of an average pair, whichever is
        larger: one odd iteration makes a worker's own error as large as the difference, and few iterations may
        show a pair too quiet by chance.
        """
        gap = int(self._sums[slow]) - int(self._sums[fast])
        if gap <= 0:
            return False
        # Python's own integers: the products do not fit 64 bits.
        sums, squares = self._sums.astype(object), self._squares.astype(object)
        scatter = self.iterations * squares - sums * sums
        pair = max(scatter[slow] + scatter[fast], 2 * scatter.sum() // self.workers)
        tenths = 20 + 5 * self.workers.bit_length()
        return bool(100 * gap * gap * (self.iterations - 1) > tenths * tenths * pair)

    def state_dict(self) -> State:
        """Everything that `from_state` needs to go on bit for bit."""
        return {"iterations": self.iterations, "sums": self._sums.tolist(), "squares": self._squares.tolist()}
