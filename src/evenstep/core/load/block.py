"""Consecutive iterations as one observation: a few milliseconds of compute show the operating system, not a worker."""

from dataclasses import dataclass, field
from typing import Final, final

import numpy as np

from evenstep.core.state import Stateful
from evenstep.core.values import IntArray, Reports

BLOCK_MICROSECONDS: Final = 40_000
"""Compute of the slowest worker in a block, at least. Longer iterations are blocks of their own."""

_ALIKE: Final = 8


@final
@dataclass(slots=True)
class Block(Stateful):
    """Adds up iterations until they have taken 40 ms, so that short iterations are judged together.

    A process that is woken, or a page that is written back, takes milliseconds from a worker. Among iterations of a few
    milliseconds this looks like a change of speed by a factor of two, for several iterations; in a mean over 40 ms it
    does not. All workers add up the same reports, so their blocks end together.
    """

    iterations: int = field(init=False, default=0)
    _sums: IntArray = field(init=False, default_factory=lambda: np.zeros((2, 0), dtype=np.int64))

    def add(self, reports: Reports) -> list[IntArray]:
        """Take in one iteration, and return the blocks that end with it: mean samples and microseconds, [2, workers].

        A block also ends before sizes that differ by more than an eighth, however short it is. Iterations in which a
        worker measured nothing do not count.
        """
        row = np.array((reports.samples, reports.compute_microseconds))
        if not row.all():
            return []
        ended = []
        if self.iterations and not self._continued_by(row):
            ended.append(self._end())
        self._sums = self._sums + row if self.iterations else row
        self.iterations += 1
        if self._sums[1].max() >= BLOCK_MICROSECONDS:
            ended.append(self._end())
        return ended

    def _continued_by(self, row: IntArray) -> bool:
        if row.shape != self._sums.shape:
            return False
        apart = np.abs(row[0] * self.iterations - self._sums[0])
        return not (apart * _ALIKE > self._sums[0]).any()

    def _end(self) -> IntArray:
        iterations, self.iterations = self.iterations, 0
        return self._sums // iterations
