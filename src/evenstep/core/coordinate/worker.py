"""A worker as the coordinator knows it, and how workers are given claims."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evenstep.core.coordinate.sizes import Sizes
from evenstep.core.errors import ProtocolError
from evenstep.core.samples.claims import ANY, Claim, Claims


@dataclass(slots=True)
class JoinedWorker:
    """A worker that has joined.

    Attributes:
        rank: its number.
        iteration: number of its last push.
        active: the sync policy has it, computing or held.
        waits: it has asked for something and has not been answered.
        ahead: number of claims that it wants besides the current one.
        claims: the claims that it holds, oldest first.
        fresh: the claims that its next answer will contain.
        answered: versions and samples committed at its latest answers, one for each claim that it may hold, oldest
            first; it computes on the weights of one of them.
        stopped_in: the pass in which it left its loop.
    """

    rank: int
    iteration: int
    active: bool = False
    waits: bool = False
    ahead: int = 0
    claims: tuple[Claim, ...] = ()
    fresh: tuple[Claim, ...] = ()
    answered: tuple[tuple[int, int], ...] = ()
    stopped_in: int | None = None

    def older_than(self, claim: int) -> int:
        """The number of its claims that are older than this one; ProtocolError if it does not hold it."""
        for older, held in enumerate(self.claims):
            if held.number == claim:
                return older
        raise ProtocolError(f"worker {self.rank} has finished the claim {claim}, but holds {self.held}")

    @property
    def held(self) -> list[int]:
        """The numbers of its claims."""
        return [claim.number for claim in self.claims]

    def finish(self, claims: Claims, count: int) -> None:
        """Finish this many of its oldest claims."""
        for claim in self.claims[:count]:
            claims.finish(claim)
        self.claims = self.claims[count:]

    def give_back(self, claims: Claims) -> None:
        """Return all its claims."""
        claims.give_back(self.claims)
        self.claims = ()

    def samples_seen(self, version: int) -> int:
        """The samples committed when the worker was given these weights; ProtocolError if it never was."""
        for answered, samples in self.answered:
            if answered == version:
                return samples
        given = sorted({answered for answered, _ in self.answered})
        raise ProtocolError(f"worker {self.rank} pushed on version {version}, but was given {given}")


def hand_out(wanting: Sequence[JoinedWorker], claims: Claims, sizes: Sizes, *, in_step: bool) -> None:
    """Give each worker the claims that it wants while samples are left, in rounds; in step, a round is one slice."""
    alike = claims.costs.alike
    while wanting and claims.unclaimed:
        slices = _slices([each.rank for each in wanting], claims, sizes) if in_step else None
        hungry: list[JoinedWorker] = []
        for worker in wanting:
            rank = worker.rank
            if slices is not None:
                claim = slices[rank]
            else:
                size, bounds = sizes.next_of(rank, claims.unclaimed), ANY if alike else sizes.bounds(rank)
                claim = claims.take(size, bounds)
            if claim is not None:
                given = (claim,)
                worker.claims += given
                worker.fresh += given
            if len(worker.claims) <= worker.ahead:
                hungry.append(worker)
        wanting = hungry


def _slices(ranks: Sequence[int], claims: Claims, sizes: Sizes) -> dict[int, Claim | None]:
    """The next slice of each group, divided among its workers that want a claim."""
    by_count = sizes.one_slice
    planned = sizes.slice_of(ranks, claims.left if by_count else claims.unclaimed)
    if claims.costs.alike:
        return {rank: claims.take(planned[rank]) for rank in ranks}
    given: dict[int, Claim | None] = dict.fromkeys(ranks)
    for members in sizes.together(ranks):
        own = np.array([planned.get(each, 0) for each in members], dtype=np.int64)
        if own.any() and claims.unclaimed:
            bounds = [sizes.bounds(each) for each in members]
            given |= zip(members, claims.take_slice(own, bounds, by_count=by_count), strict=True)
    return given
