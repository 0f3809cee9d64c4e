"""What a worker of a run on servers computes on: the claims that the servers have given it, one after another."""

from collections import deque
from collections.abc import Callable
from typing import final

import numpy as np

from evenstep.core.samples import Share
from evenstep.core.samples.claims import Claim
from evenstep.core.values import IntArray


@final
class ClaimedShares:
    """The claims in hand, oldest first; `more` is asked when there are none, and says False when the pass is over.

    Args:
        more: Waits for claims, which it adds with `add`, or for the end.
        minimum: The fewest samples that a worker can compute on.
    """

    def __init__(self, more: Callable[[], bool], minimum: int) -> None:
        self.misses = 0
        self._more = more
        self._minimum = minimum
        self._claims: deque[Claim] = deque()
        self._asked: deque[tuple[int, deque[int]]] = deque()
        self._sizes: IntArray = np.zeros(0, dtype=np.int64)

    def add(self, claims: tuple[Claim, ...]) -> None:
        """These come after what is in hand."""
        self._claims.extend(claims)
        self._asked.extend((claim.number, deque(claim.positions)) for claim in claims)

    def plan(self, sizes: IntArray) -> None:
        """Everybody's planned sizes, int64 of shape [workers]."""
        self._sizes = sizes

    @property
    def empty(self) -> bool:
        """Whether nothing is in hand."""
        return not self._claims

    def drop(self) -> None:
        """What is in hand belongs to others now."""
        self._claims.clear()
        self._asked.clear()

    def replan(self) -> None:
        """Claims do not change."""

    def share(self) -> Share | None:
        """The claim to compute on now, or None when the pass is over."""
        while not self._claims:
            if not self._more():
                return None
        claim = self._claims[0]
        positions = claim.positions
        copies = -(-self._minimum // len(positions))
        return Share(
            iteration=claim.number,
            positions=positions * copies if copies > 1 else positions,
            samples=claim.samples,
            sizes=self._sizes,
        )

    def advance(self) -> None:
        """It has been handed out."""
        self._claims.popleft()

    def request(self, limit: int) -> tuple[int, tuple[int, ...]] | None:
        """The next positions to fetch, at most `limit`, all of one claim; None when all are asked for."""
        while self._asked and not self._asked[0][1]:
            self._asked.popleft()
        if not self._asked:
            return None
        number, positions = self._asked[0]
        return number, tuple(positions.popleft() for _ in range(min(limit, len(positions))))
