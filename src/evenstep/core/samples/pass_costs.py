"""Costs of the positions of a pass on servers: where a claim of a given cost ends, and how slices are divided.

Whole numbers, so that a replay of a run finds the same claims.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self, final

import numpy as np

from evenstep.core.load.shares import short_slice_sizes
from evenstep.core.samples.balanced import balanced, consecutive, fitted
from evenstep.core.values import UNLIMITED, IntArray

MAX_RANGES: Final = 256
"""The largest number of ranges in a claim."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimBounds:
    """Limits of a worker's claim: `fewest` and `most` samples, and at most the cost of `room` average samples.

    A claim has at least the fewest samples, whatever they cost.
    """

    fewest: int = 1
    most: int = UNLIMITED
    room: int = UNLIMITED


@final
@dataclass(frozen=True, slots=True, eq=False)
class PassCosts:
    """The costs of the positions of a pass.

    Attributes:
        before: The total cost of all positions before each one, int64 of shape [positions + 1].
        mean: The cost of an average sample of the dataset, at least 1.
        alike: Whether each position costs 1, because no costs were given.
    """

    before: IntArray | range
    mean: int
    alike: bool = False

    @classmethod
    def of(cls, costs: IntArray, mean: int) -> Self:
        """Make from the cost of each position, an array of whole numbers from 1 to 2^31."""
        return cls(np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(costs, dtype=np.int64))), mean)

    @classmethod
    def unit(cls, length: int) -> Self:
        """The costs of `length` positions that cost alike."""
        return cls(range(length + 1), 1, alike=True)

    def between(self, start: int, stop: int) -> int:
        """The cost of these positions."""
        return int(self.before[stop]) - int(self.before[start])

    def cut(self, start: int, stop: int, wanted: int) -> int:
        """The place to cut these positions so that the cost before the cut is as close to `wanted` as possible."""
        goal = int(self.before[start]) + wanted
        below = bisect_left(self.before, goal, start + 1, stop + 1) - 1
        if below == stop:
            return stop
        return below + (int(self.before[below + 1]) - goal < goal - int(self.before[below]))

    def reach(self, start: int, stop: int, room: int) -> int:
        """The place to cut these positions so that the cost before the cut is at most `room`."""
        most = int(self.before[start]) + room
        return bisect_right(self.before, most, start + 1, stop + 1) - 1

    def owners(self, positions: IntArray, sizes: IntArray, bounds: Sequence[ClaimBounds]) -> IntArray:
        """Divide the positions of a slice so that workers have costs in proportion to their sizes.

        Args:
            positions: The slice, int64 of shape [slice].
            sizes: The planned size of each worker, int64 of shape [workers]; a worker with 0 gets none.
            bounds: The bounds of each worker. Together they allow at least as many samples as the slice has.

        Returns:
            The worker of each position, by its place in `sizes`. The positions of a worker are in at most `MAX_RANGES`
            ranges if those of the slice are in one, since they travel in one message.
        """
        before, fewest = np.asarray(self.before), bounds[0].fewest
        costs = before[positions + 1] - before[positions]
        if int(np.minimum(sizes, fewest).sum()) > len(positions):
            sizes = short_slice_sizes(sizes, len(positions), fewest)
        lower = np.minimum(sizes, fewest)
        upper = np.where(sizes > 0, np.maximum([each.most for each in bounds], sizes), 0)
        owners = balanced(costs, sizes, lower=lower, upper=upper)
        begins = np.append(True, (np.diff(owners) != 0) | (np.diff(positions) != 1))
        if int(np.bincount(owners[begins]).max()) > MAX_RANGES:
            # With this many samples, consecutive parts are nearly as equal.
            parts = consecutive(costs, sizes)
            if (np.bincount(parts, minlength=len(sizes)) <= upper).all():
                owners = parts
        room = np.array([each.room for each in bounds], dtype=np.int64)
        return owners if room.min() >= UNLIMITED else fitted(owners, costs, room * self.mean, lower=lower, upper=upper)
