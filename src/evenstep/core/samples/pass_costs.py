"""What the positions of a pass cost on servers: where a claim of some cost ends, and how slices are shared out.

Whole numbers, so that a replay of a run finds the same claims.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self, final

import numpy as np

from evenstep.core.samples.assignment import short_slice_sizes
from evenstep.core.samples.balanced import balanced, fitted
from evenstep.core.values import UNLIMITED, IntArray

MAX_RANGES: Final = 256
"""Of a claim."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimBounds:
    """What a claim of a worker may be: `fewest` and `most` samples, and `room` average samples' cost at most.

    A claim has the fewest samples whatever they cost.
    """

    fewest: int = 1
    most: int = UNLIMITED
    room: int = UNLIMITED


@final
@dataclass(frozen=True, slots=True, eq=False)
class PassCosts:
    """The costs of the positions of a pass.

    Attributes:
        before: What all positions before each one cost together, int64 of shape [positions + 1].
        mean: The cost of an average sample of the dataset, at least 1.
    """

    before: IntArray
    mean: int

    @classmethod
    def of(cls, costs: IntArray, mean: int) -> Self:
        """From the cost of each position, an array of whole numbers from 1 to 2^31."""
        return cls(np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(costs, dtype=np.int64))), mean)

    def between(self, start: int, stop: int) -> int:
        """What these positions cost."""
        return int(self.before[stop]) - int(self.before[start])

    def cut(self, start: int, stop: int, wanted: int) -> int:
        """Where to cut these positions so that what is before it costs as close to `wanted` as possible."""
        goal = int(self.before[start]) + wanted
        below = start + int(np.searchsorted(self.before[start + 1 : stop + 1], goal, side="left"))
        if below == stop:
            return stop
        return below + (int(self.before[below + 1]) - goal < goal - int(self.before[below]))

    def reach(self, start: int, stop: int, room: int) -> int:
        """Where to cut these positions so that what is before it costs at most `room`."""
        most = int(self.before[start]) + room
        return start + int(np.searchsorted(self.before[start + 1 : stop + 1], most, side="right"))

    def average(self, cost: int) -> int:
        """How many average samples cost as much, rounded up."""
        return -(-cost // self.mean)

    def owners(self, positions: IntArray, sizes: IntArray, bounds: Sequence[ClaimBounds]) -> IntArray:
        """Share the positions of a slice out so that workers have costs in proportion to their sizes.

        Args:
            positions: The slice, int64 of shape [slice].
            sizes: The planned size of each worker, int64 of shape [workers]; a worker with 0 gets none.
            bounds: Those of each worker. The most samples that these allow together are at least the slice.

        Returns:
            The worker of each position, by its place in `sizes`. The positions of a worker are in at most `MAX_RANGES`
            ranges if those of the slice are in one, since they travel in one message.
        """
        costs, fewest = self.before[positions + 1] - self.before[positions], bounds[0].fewest
        if int(np.minimum(sizes, fewest).sum()) > len(positions):
            sizes = short_slice_sizes(sizes, len(positions), fewest)
        lower = np.minimum(sizes, fewest)
        upper = np.where(sizes > 0, np.maximum([each.most for each in bounds], sizes), 0)
        owners = balanced(costs, sizes, lower=lower, upper=upper)
        begins = np.append(True, (np.diff(owners) != 0) | (np.diff(positions) != 1))
        if int(np.bincount(owners[begins]).max()) > MAX_RANGES:
            # Of so many samples, consecutive parts are as equal to within little.
            consecutive = _consecutive(costs, sizes)
            if (np.bincount(consecutive, minlength=len(sizes)) <= upper).all():
                owners = consecutive
        room = np.array([each.room for each in bounds], dtype=np.int64)
        return owners if room.min() >= UNLIMITED else fitted(owners, costs, room * self.mean, lower=lower, upper=upper)


def _consecutive(costs: IntArray, sizes: IntArray) -> IntArray:
    """The workers of consecutive samples, with cost in proportion to the sizes, within one sample."""
    ends, passed = np.cumsum(sizes), np.cumsum(costs)
    # Quotients of float64 are rounded alike on every processor.
    owners: IntArray = np.searchsorted(ends / ends[-1], (2 * passed - costs) / (2 * passed[-1]), side="right")
    return owners
