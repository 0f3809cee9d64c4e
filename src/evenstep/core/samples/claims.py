"""The exactly-once ledger of an epoch that workers share without a barrier: who computes on what, and what is done."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, cast, final

import numpy as np

from evenstep.core.errors import ProtocolError
from evenstep.core.samples.pass_costs import MAX_RANGES, ClaimBounds, PassCosts
from evenstep.core.values import IntArray, State

Range = tuple[int, int]
"""Positions of an epoch, the first included, the last excluded."""


@final
@dataclass(slots=True, unsafe_hash=True)
class Claim:
    """Positions that one worker alone computes on; `number` names the claim within its epoch."""

    number: Final[int]
    ranges: Final[tuple[Range, ...]]

    @property
    def samples(self) -> int:
        """How many positions it has."""
        samples = 0
        for start, stop in self.ranges:
            samples += stop - start
        return samples

    @property
    def positions(self) -> tuple[int, ...]:
        """The positions, in the order in which they are computed on."""
        return tuple(position for start, stop in self.ranges for position in range(start, stop))


_UNKNOWN: Final = (-1, Claim(-1, ()))


@final
class Claims:
    """Hands out the positions 0 to `length` - 1 of an epoch; each is finished exactly once.

    A claim is open until it is finished (committed) or given back (its worker left, or left the loop). Positions that
    were given back are handed out again before any new ones.

    Attributes:
        length: number of positions in the epoch.
        costs: what each position costs; None if all cost alike.
        unclaimed: how many positions can be claimed now; with costs, how many average samples cost as much, rounded up.
        finished: how many positions are finished.
    """

    def __init__(self, length: int, costs: PassCosts | None = None) -> None:
        self.length = length
        self.costs: PassCosts | None = None
        self.unclaimed = length
        self.finished = 0
        self._next = 0
        self._number = 0
        self._returned: deque[Range] = deque()
        self._open: dict[int, tuple[int, Claim]] = {}  # Worker and claim by number.
        self._cost = 0  # Of the positions that can be claimed now.
        if costs is not None:
            self.weigh(costs)

    def weigh(self, costs: PassCosts) -> None:
        """From now on claims are sized by these costs."""
        self.costs = costs
        self._count_cost(sum(costs.between(*piece) for piece in self._pieces()))

    @property
    def over(self) -> bool:
        """Whether every position is finished."""
        return self.finished == self.length

    def take(self, worker: int, size: int) -> Claim | None:
        """Claim up to `size` positions; None if none is left to claim."""
        if size > self.unclaimed:
            size = self.unclaimed
        if not size:
            return None
        ranges: list[Range] = []
        wanted = self._take_returned(ranges, size) if self._returned else size
        if wanted:
            start = self._next
            self._next = stop = start + wanted
            _append(ranges, (start, stop))
        number = self._number
        claim = Claim(number, tuple(ranges))
        self._open[number] = worker, claim
        self._number = number + 1
        self.unclaimed -= size
        return claim

    def take_cost(self, worker: int, size: int, bounds: ClaimBounds) -> Claim | None:
        """Claim the next positions that cost about what `size` average samples cost; None if none is left to claim.

        It costs at most half of its last sample more than the size, unless it has the fewest samples. It includes what
        is left after it if that is less than a worker can compute on and the bounds allow it.
        """
        if not size or not self.unclaimed:
            return None
        costs = self._known_costs
        ranges = self._gather(size * costs.mean, bounds, pieces=MAX_RANGES)
        count, spent = _count(ranges), sum(costs.between(*piece) for piece in ranges)
        pieces = self._pieces()
        if 0 < (rest := _count(pieces)) < bounds.fewest and count + rest <= bounds.most:
            left = bounds.room * costs.mean - spent
            if sum(costs.between(*piece) for piece in pieces) <= left:
                for piece in self._gather(None, ClaimBounds()):
                    _append(ranges, piece)
        return self._claim(worker, ranges)

    def take_slice(
        self, workers: Sequence[int], sizes: IntArray, bounds: Sequence[ClaimBounds], *, by_count: bool
    ) -> list[Claim | None]:
        """Claims of workers that compute together on the next positions, with costs in proportion to their sizes.

        Args:
            workers: Their ranks.
            sizes: The planned size of each, int64 of shape [workers], in average samples; not all are 0.
            bounds: Those of each.
            by_count: Whether the slice has as many positions as the sizes, whatever they cost, if all find room. If
                not, it costs about as much as the sizes.
        """
        whole, costs = int(sizes.sum()), self._known_costs
        most = sum(max(each.most, size) for each, size in zip(bounds, sizes.tolist(), strict=True))
        fewest = max(int(np.minimum(sizes, bounds[0].fewest).sum()), 1)
        room = sum(each.room for each in bounds)
        of_all = ClaimBounds(fewest=fewest, most=min(most, whole) if by_count else most, room=room)
        ranges = self._gather(None if by_count else whole * costs.mean, of_all)
        positions = np.concatenate([np.arange(start, stop) for start, stop in ranges])
        owners = costs.owners(positions, sizes, bounds)
        claims: list[Claim | None] = []
        for place, worker in enumerate(workers):
            own: list[Range] = []
            for position in positions[owners == place].tolist():
                _append(own, (position, position + 1))
            claims.append(self._claim(worker, own) if own else None)
        return claims

    @property
    def left(self) -> int:
        """How many positions can be claimed now."""
        return _count(self._pieces())

    @property
    def _known_costs(self) -> PassCosts:
        assert self.costs is not None
        return self.costs

    def _pieces(self) -> list[Range]:
        """What can be claimed now, in the order in which it is handed out."""
        return [*self._returned, (self._next, self.length)] if self._next < self.length else [*self._returned]

    def _gather(self, wanted: int | None, bounds: ClaimBounds, pieces: int | None = None) -> list[Range]:
        """Take the next positions, of about this cost or as many as the bounds allow. Some are left.

        At most so many `pieces` that were given back are among them.
        """
        costs, ranges, count = self._known_costs, list[Range](), 0
        # No more than there is, so that sums stay far from the largest int64.
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

    def _count_cost(self, cost: int) -> None:
        self._cost, self.unclaimed = cost, self._known_costs.average(cost)

    def _claim(self, worker: int, ranges: list[Range]) -> Claim:
        claim = Claim(self._number, tuple(ranges))
        self._open[claim.number] = worker, claim
        self._number += 1
        return claim

    def _take_returned(self, ranges: list[Range], wanted: int) -> int:
        """Add up to this many positions that were given back; returns how many are still wanted."""
        while wanted and self._returned:
            start, stop = self._returned.popleft()
            cut = min(stop, start + wanted)
            if cut < stop:
                self._returned.appendleft((cut, stop))
            _append(ranges, (start, cut))
            wanted -= cut - start
        return wanted

    def finish(self, worker: int, number: int) -> None:
        """The worker's claim is in the parameters; ProtocolError if it does not hold this claim."""
        self.finished += self._close(worker, number).samples

    def give_back(self, worker: int, numbers: Iterable[int]) -> None:
        """Return open claims of the worker; ProtocolError if it does not hold them."""
        for number in numbers:
            claim = self._close(worker, number)
            self._returned.extend(claim.ranges)
            if self.costs is None:
                self.unclaimed += claim.samples
            else:
                self._count_cost(self._cost + sum(self.costs.between(*piece) for piece in claim.ranges))
        if self.costs is not None:  # Claims of a slice are in many pieces.
            self._returned = deque(_joined(self._returned))

    def _close(self, worker: int, number: int) -> Claim:
        holder, claim = self._open.get(number, _UNKNOWN)
        if holder != worker:
            raise ProtocolError(f"worker {worker} is done with the claim {number}, which it does not hold")
        del self._open[number]
        return claim

    def state_dict(self) -> State:
        """What is not finished; open claims count as given back, since no worker holds them after a restart."""
        pieces = [*self._returned, *(piece for _, claim in self._open.values() for piece in claim.ranges)]
        return {
            "length": self.length,
            "next": self._next,
            "number": self._number,
            "returned": [list(piece) for piece in sorted(pieces)],
        }

    def load_state_dict(self, state: State) -> None:
        """Continue where the given state was taken; what positions cost is told again."""
        self.costs = None
        self.length = cast("int", state["length"])
        self._next = cast("int", state["next"])
        self._number = cast("int", state["number"])
        self._returned = deque((start, stop) for start, stop in cast("list[Range]", state["returned"]))
        self._open = {}
        self.unclaimed = self.left
        self.finished = self.length - self.unclaimed


def _count(ranges: Iterable[Range]) -> int:
    return sum(stop - start for start, stop in ranges)


def _joined(ranges: Iterable[Range]) -> list[Range]:
    """The same positions, ascending, in as few pieces as possible."""
    joined: list[Range] = []
    for piece in sorted(ranges):
        _append(joined, piece)
    return joined


def _append(ranges: list[Range], piece: Range) -> None:
    """Add the piece, joined with the last one if it continues it, so that pieces do not become ever smaller."""
    if ranges and ranges[-1][1] == piece[0]:
        piece = (ranges.pop()[0], piece[1])
    ranges.append(piece)
