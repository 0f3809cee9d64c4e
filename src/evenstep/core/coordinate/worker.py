"""A worker as the coordinator knows it, and how workers are given claims."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

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
