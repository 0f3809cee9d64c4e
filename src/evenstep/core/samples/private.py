"""Private data: each worker takes its own samples, in the same number of iterations as the others."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from evenstep.core.values import IntArray


@final
@dataclass(frozen=True, slots=True)
class PrivateParts:
    """The parts of an epoch of K iterations: x_i = floor((k + 1) n_i / K) - floor(k n_i / K) of a worker's n_i samples.

    Over the epoch they sum to n_i, and no two iterations of a worker differ by more than a sample.

    >>> [PrivateParts([7, 3], 4).sizes(k).tolist() for k in range(4)]
    [[1, 0], [2, 1], [2, 1], [2, 1]]
    """

    lengths: Sequence[int]
    iterations: int

    def sizes(self, iteration: int) -> IntArray:
        """The samples of each worker in an iteration, int64 of shape [workers]."""
        return np.diff([[self._end(each, iteration), self._end(each, iteration + 1)] for each in self.lengths])[:, 0]

    def positions(self, worker: int, iteration: int) -> range:
        """A worker's positions in its own order; without any, the last one before, whose gradient does not count."""
        length = self.lengths[worker]
        start, stop = self._end(length, iteration), self._end(length, iteration + 1)
        return range(start, stop) or range(max(start - 1, 0), max(start, 1))

    def _end(self, length: int, iteration: int) -> int:
        return iteration * length // self.iterations
