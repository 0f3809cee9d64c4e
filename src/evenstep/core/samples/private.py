"""The shares of an epoch of private data: each worker takes its own samples, in as many iterations as all others."""

from collections.abc import Sequence
from typing import final

import numpy as np

from evenstep.core.samples.ledger import Ledger
from evenstep.core.samples.share import Request, Share
from evenstep.core.values import IntArray


def private_sizes(lengths: Sequence[int], iteration: int, iterations: int) -> IntArray:
    """The samples of each worker in an iteration: x_i = floor((k + 1) n_i / K) - floor(k n_i / K).

    Over the K iterations of an epoch they sum to n_i, and no two iterations of a worker differ by more than a sample.

    >>> [private_sizes([7, 3], k, 4).tolist() for k in range(4)]
    [[1, 0], [2, 1], [2, 1], [2, 1]]
    """
    return np.array([_end(n, iteration + 1, iterations) - _end(n, iteration, iterations) for n in lengths])


def _end(length: int, iteration: int, iterations: int) -> int:
    return iteration * length // iterations


@final
class PrivateShares:
    """One worker's shares of its own data, whose positions are those of its own order.

    Args:
        ledger: An epoch of all workers' samples together, which has as many iterations.
        lengths: The samples of each worker, at least 1.
        worker: Rank of the worker whose shares these are.
        depth: How many iterations beyond the present one may be fetched ahead.
        minimum: The fewest samples that a worker can compute on.

    Attributes:
        misses: Always 0, because sizes never change.
    """

    def __init__(self, ledger: Ledger, lengths: Sequence[int], *, worker: int, depth: int, minimum: int = 1) -> None:
        self._ledger = ledger
        self._lengths = lengths
        self._worker = worker
        self._depth = depth
        self._minimum = minimum
        self._asking, self._asked = ledger.iteration, 0
        self.misses = 0

    def replan(self) -> None:
        pass

    def share(self) -> Share | None:
        iteration, iterations = self._ledger.iteration, self._ledger.iterations
        if iteration == iterations:
            return None
        sizes, positions = private_sizes(self._lengths, iteration, iterations), self._needed(iteration)
        return Share(
            iteration=iteration,
            positions=positions * max(-(-self._minimum // len(positions)), 1),
            samples=int(sizes[self._worker]),
            sizes=sizes,
            ends_epoch=iteration == iterations - 1,
        )

    def advance(self) -> None:
        self._ledger.skip()

    def request(self, limit: int | None, *, whole: bool = False) -> Request | None:
        while self._asking < min(self._ledger.iteration + self._depth + 1, self._ledger.iterations):
            needed = self._needed(self._asking)
            positions = needed[self._asked :][:limit]
            if positions:
                self._asked += len(positions)
                whole = whole and positions == needed and len(needed) >= self._minimum
                return Request(iteration=self._asking, positions=positions, whole=whole)
            self._asking, self._asked = self._asking + 1, 0
        return None

    def _needed(self, iteration: int) -> tuple[int, ...]:
        """The positions of an iteration; the last one before it if it has none, whose gradient does not count."""
        length, iterations = self._lengths[self._worker], self._ledger.iterations
        start, stop = _end(length, iteration, iterations), _end(length, iteration + 1, iterations)
        return tuple(range(start, stop)) or (max(start - 1, 0),)
