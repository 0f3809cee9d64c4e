"""A worker as the coordinator knows it, and how workers are given claims."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from evenstep.core.coordinate.sizes import Sizes
from evenstep.core.errors import ProtocolError
from evenstep.core.samples.claims import Claim, Claims


@dataclass(slots=True)
class Worker:
    """A worker that has joined.

    Attributes:
        rank: its number.
        iteration: number of its last push.
        active: the sync policy has it, computing or held.
        waits: it has asked for something and was not answered.
        ahead: how many claims it wants besides the one in hand.
        claims: numbers of the claims that it holds, oldest first.
        fresh: those of its claims that its next answer tells it.
        answered: versions and samples committed at its latest answers, one for each claim that it may hold; it computes
            on no other weights.
    """

    rank: int
    iteration: int
    active: bool = False
    waits: bool = False
    ahead: int = 0
    claims: list[int] = field(default_factory=list)
    fresh: list[Claim] = field(default_factory=list)
    answered: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=1))

    def older_than(self, claim: int) -> int:
        """How many of its claims are older than this one; ProtocolError if it does not hold it."""
        try:
            return self.claims.index(claim)
        except ValueError:
            raise ProtocolError(f"worker {self.rank} is done with the claim {claim}, but holds {self.claims}") from None

    def finish(self, claims: Claims, count: int) -> None:
        """It is done with this many of its oldest claims."""
        for number in self.claims[:count]:
            claims.finish(self.rank, number)
        del self.claims[:count]

    def give_back(self, claims: Claims) -> None:
        """Its claims go back."""
        claims.give_back(self.rank, self.claims)
        self.claims = []

    def samples_seen(self, version: int) -> int:
        """Samples committed when the worker was given these weights; ProtocolError if it was not."""
        for answered, samples in self.answered:
            if answered == version:
                return samples
        given = sorted({answered for answered, _ in self.answered})
        raise ProtocolError(f"worker {self.rank} pushed on version {version}, but was given {given}")


def hand_out(wanting: Sequence[Worker], claims: Claims, sizes: Sizes, *, in_step: bool) -> None:
    """Give each worker the claims that it wants, while samples are left, in rounds; in step, a round is a slice."""
    if claims.costs is not None:
        _hand_out_by_cost(wanting, claims, sizes, in_step=in_step)
        return
    while wanting and claims.unclaimed:
        planned = sizes.slice_of([each.rank for each in wanting], claims.unclaimed) if in_step else None
        still_wanting = []
        for worker in wanting:
            rank = worker.rank
            claim = claims.take(rank, sizes.next_of(rank, claims.unclaimed) if planned is None else planned[rank])
            if claim is not None:
                worker.claims.append(claim.number)
                worker.fresh.append(claim)
            if len(worker.claims) <= worker.ahead:
                still_wanting.append(worker)
        wanting = still_wanting


def _hand_out_by_cost(wanting: Sequence[Worker], claims: Claims, sizes: Sizes, *, in_step: bool) -> None:
    while wanting and claims.unclaimed:
        given = _slices(wanting, claims, sizes) if in_step else {}
        for worker in wanting:
            rank = worker.rank
            if not in_step and claims.unclaimed:
                given[rank] = claims.take_cost(rank, sizes.next_of(rank, claims.unclaimed), sizes.bounds(rank))
            claim = given.get(rank)
            if claim is not None:
                worker.claims.append(claim.number)
                worker.fresh.append(claim)
        wanting = [worker for worker in wanting if len(worker.claims) <= worker.ahead]


def _slices(wanting: Sequence[Worker], claims: Claims, sizes: Sizes) -> dict[int, Claim | None]:
    """The next slice of each group, shared out by cost among those of its workers that want a claim."""
    ranks, by_count = [each.rank for each in wanting], sizes.one_slice
    planned = sizes.slice_of(ranks, claims.left if by_count else claims.unclaimed)
    given: dict[int, Claim | None] = {}
    for members in sizes.together(ranks):
        own = np.array([planned.get(each, 0) for each in members], dtype=np.int64)
        if own.any() and claims.unclaimed:
            bounds = [sizes.bounds(each) for each in members]
            given |= zip(members, claims.take_slice(members, own, bounds, by_count=by_count), strict=True)
    return given
