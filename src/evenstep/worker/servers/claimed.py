"""The samples of a worker on servers: the claims that the servers gave it, one after another."""

from collections import deque
from collections.abc import Callable
from typing import final

import numpy as np

from evenstep.core.samples import EpochCosts, Request, Share
from evenstep.core.samples.claims import Claim
from evenstep.core.values import IntArray


@final
class ClaimedShares:
    """The current claims, oldest first.

    Args:
        more: Called before each share. Adds claims with `add` if they are needed; returns False if there are none.
        minimum: The smallest number of samples that a worker can compute on.
        costs: The costs of the samples of the epoch; None if all cost alike.
    """

    def __init__(self, more: Callable[[], bool], minimum: int, costs: EpochCosts | None = None) -> None:
        self.misses = 0
        self._more = more
        self._minimum = minimum
        self._costs = costs
        self._claims: deque[Claim] = deque()
        self._asked: deque[tuple[int, tuple[int, ...]]] = deque()
        self._sizes: IntArray = np.zeros(0, dtype=np.int64)

    def add(self, claims: tuple[Claim, ...]) -> None:
        """Append claims."""
        self._claims.extend(claims)
        self._asked.extend((claim.number, claim.positions) for claim in claims)

    def plan(self, sizes: IntArray) -> None:
        """Set the planned sizes of all workers, int64 of shape [workers]."""
        self._sizes = sizes

    @property
    def empty(self) -> bool:
        """True if there are no claims."""
        return not self._claims

    def drop(self) -> None:
        """Forget all claims, which now belong to other workers."""
        self._claims.clear()
        self._asked.clear()

    def replan(self) -> None:
        """Do nothing: claims do not change."""

    def share(self) -> Share | None:
        """Return the current claim, or None if there is none."""
        if not self._more():
            return None
        claim = self._claims[0]
        positions = claim.positions
        copies = -(-self._minimum // len(positions))
        positions = positions * copies if copies > 1 else positions
        return Share(
            iteration=claim.number,
            positions=positions,
            samples=claim.samples,
            sizes=self._sizes,
            cost=None if self._costs is None else self._costs.samples(positions),
        )

    def advance(self) -> None:
        """Called when the current claim was returned to the script."""
        self._claims.popleft()

    def request(self, limit: int | None, *, whole: bool = False) -> Request | None:
        """Return the next positions to fetch, at most `limit`, all of one claim; None if there are no more."""
        if not self._asked:
            return None
        number, positions = self._asked.popleft()
        if limit is not None and limit < len(positions):
            self._asked.appendleft((number, positions[limit:]))
            return Request(iteration=number, positions=positions[:limit])
        return Request(iteration=number, positions=positions, whole=whole and len(positions) >= self._minimum)
