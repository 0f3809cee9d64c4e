"""The exactly-once ledger of an epoch shared without a barrier: which worker computes what, and what is finished."""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, Self, cast, final

import numpy as np
from msgspec import Struct

from evenstep.core.samples.pass_costs import MAX_RANGES, ClaimBounds, PassCosts
from evenstep.core.values import IntArray, State

Range = tuple[int, int]
"""Positions of an epoch, the first included, the last excluded."""


@final
class Claim(Struct, frozen=True, gc=False):
    """The positions, `samples` many, that one worker alone computes on; `number` names the claim within its epoch."""

    number: int
    ranges: tuple[Range, ...]
    samples: int

    @classmethod
    def of(cls, number: int, ranges: tuple[Range, ...]) -> Self:
        """The claim of these positions."""
        return cls(number, ranges, _count(ranges))

    @property
    def positions(self) -> tuple[int, ...]:
        """The positions, in the order in which they are computed on."""
        return tuple(position for start, stop in self.ranges for position in range(start, stop))


ANY: Final = ClaimBounds()


@final
class Claims:
    """Hands out the positions 0 to `length` - 1 of an epoch; each is finished exactly once.

    A claim is open until it is finished (committed) or given back (its worker left, or left the loop). Returned
    positions are handed out again before any new ones.

    Attributes:
        length: number of positions in the epoch.
        costs: the cost of each position.
        unclaimed: the cost of the positions that can be claimed now, in average samples, rounded up.
        finished: number of finished positions.
    """

    def __init__(self, length: int, costs: PassCosts | None = None) -> None:
        self.length = length
        self.unclaimed = self._cost = 0
        self.finished = 0
        self._next = 0
        self._number = 0
        self._returned: deque[Range] = deque()
        self.weigh(PassCosts.unit(length) if costs is None else costs)

    def weigh(self, costs: PassCosts) -> None:
        """From now on claims are sized by these costs."""
        self.costs = costs
        self._count_cost(self._cost_of(self._pieces()))

    @property
    def over(self) -> bool:
        """True if every position is finished."""
        return self.finished == self.length

    def take(self, size: int, bounds: ClaimBounds = ANY) -> Claim | None:
        """Claim the next positions that cost about as much as `size` average samples; None if none is left to claim.

        If all positions cost alike, the claim has exactly `size` of them while there are enough. Otherwise it costs at
        most half of its last sample more than the size, unless it has the fewest samples. It includes the rest after it
        if that is less than a worker can compute on and the bounds allow it.
        """
        if not size or not self.unclaimed:
            return None
        costs = self.costs
        if costs.alike and not self._returned:  # The usual case.
            start, length = self._next, self.length
            size = min(size, length - start)
            self._next = stop = start + size
            self.unclaimed = self._cost = length - stop
            return self._claim(((start, stop),), size)
        ranges = self._gather(size * costs.mean, bounds, pieces=MAX_RANGES)
        count, spent = _count(ranges), self._cost_of(ranges)
        pieces = self._pieces()
        if 0 < (rest := _count(pieces)) < bounds.fewest and count + rest <= bounds.most:
            left = bounds.room * costs.mean - spent
            if self._cost_of(pieces) <= left:
                for piece in self._gather(None, ANY):
                    _append(ranges, piece)
        return self._claim(tuple(ranges), _count(ranges))

    def take_slice(self, sizes: IntArray, bounds: Sequence[ClaimBounds], *, by_count: bool) -> list[Claim | None]:
        """Claims of workers that compute together on the next positions, with costs in proportion to their sizes.

        Args:
            sizes: The planned size of each worker, int64 of shape [workers], in average samples; not all are 0.
            bounds: The bounds of each worker's claim.
            by_count: Whether the slice has as many positions as the sizes' sum, whatever they cost, if all find room.
                If not, it costs about as much as the sizes.
        """
        whole, costs = int(sizes.sum()), self.costs
        most = sum(max(each.most, size) for each, size in zip(bounds, sizes.tolist(), strict=True))
        fewest = max(int(np.minimum(sizes, bounds[0].fewest).sum()), 1)
        room = sum(each.room for each in bounds)
        of_all = ClaimBounds(fewest=fewest, most=min(most, whole) if by_count else most, room=room)
        ranges = self._gather(None if by_count else whole * costs.mean, of_all)
        positions = np.concatenate([np.arange(start, stop) for start, stop in ranges])
        owners = costs.owners(positions, sizes, bounds)
        claims: list[Claim | None] = []
        for place in range(len(sizes)):
            own: list[Range] = []
            for position in positions[owners == place].tolist():
                _append(own, (position, position + 1))
            claims.append(self._claim(tuple(own), _count(own)) if own else None)
        return claims

    @property
    def left(self) -> int:
        """The number of positions that can be claimed now."""
        return _count(self._pieces())

    def _pieces(self) -> list[Range]:
        """The positions that can be claimed now, in the order in which they are handed out."""
        return [*self._returned, (self._next, self.length)] if self._next < self.length else [*self._returned]

    def _gather(self, wanted: int | None, bounds: ClaimBounds, pieces: int | None = None) -> list[Range]:
        """Take the next positions, of about the `wanted` cost or as many as the bounds allow. Some must be left.

        At most this many `pieces` that were given back are among them.
        """
        costs, ranges, count = self.costs, list[Range](), 0
        # No more than exists, so that sums stay far from the largest int64.
        room = min(bounds.room * costs.mean, self._cost)
        wanted = None if wanted is None else min(wanted, self._cost)
        for start, stop in self._pieces()[:pieces]:
            cut = min(stop if wanted is None else costs.cut(start, stop, wanted), costs.reach(start, stop, room))
            cut = min(max(cut, start + bounds.fewest - count), start + bounds.most - count, stop)
            if cut <= start:
                break
            if self._returned:
                del self._returned[0]
                if cut < stop:
                    self._returned.appendleft((cut, stop))
            else:
                self._next = cut
            _append(ranges, (start, cut))
            spent = costs.between(start, cut)
            self._count_cost(self._cost - spent)
            count, room, wanted = count + cut - start, room - spent, None if wanted is None else wanted - spent
            if cut < stop:
                break
        return ranges

    def _cost_of(self, pieces: Iterable[Range]) -> int:
        return sum(self.costs.between(*piece) for piece in pieces)

    def _count_cost(self, cost: int) -> None:
        self._cost, self.unclaimed = cost, -(-cost // self.costs.mean)

    def _claim(self, ranges: tuple[Range, ...], samples: int) -> Claim:
        number = self._number
        self._number = number + 1
        return Claim(number, ranges, samples)

    def finish(self, claim: Claim) -> None:
        """This claim, which was open, is in the parameters."""
        self.finished += claim.samples

    def give_back(self, claims: Iterable[Claim]) -> None:
        """Return these claims, which were open."""
        for claim in claims:
            self._returned.extend(claim.ranges)
            self._count_cost(self._cost + self._cost_of(claim.ranges))
        if not self.costs.alike:  # A slice's claims consist of many pieces: join them to as few as possible.
            joined: list[Range] = []
            for piece in sorted(self._returned):
                _append(joined, piece)
            self._returned = deque(joined)

    def state_dict(self, unfinished: Iterable[Claim]) -> State:
        """The unfinished positions; open claims, which are given, count as returned: a restart leaves no holder."""
        pieces = [*self._returned, *(piece for claim in unfinished for piece in claim.ranges)]
        return {
            "length": self.length,
            "next": self._next,
            "number": self._number,
            "returned": [list(piece) for piece in sorted(pieces)],
        }

    def load_state_dict(self, state: State) -> None:
        """Continue from the given state; the costs of positions are told again."""
        self.length = cast("int", state["length"])
        self._next = cast("int", state["next"])
        self._number = cast("int", state["number"])
        self._returned = deque((start, stop) for start, stop in cast("list[Range]", state["returned"]))
        self.finished = self.length - self.left
        self.weigh(PassCosts.unit(self.length))


def _count(ranges: Iterable[Range]) -> int:
    return sum(stop - start for start, stop in ranges)


def _append(ranges: list[Range], piece: Range) -> None:
    """Add the piece, merged with the last one if it continues it, so that pieces do not become ever smaller."""
    if ranges and ranges[-1][1] == piece[0]:
        piece = (ranges.pop()[0], piece[1])
    ranges.append(piece)
