"""The exactly-once ledger of an epoch that workers share without a barrier: who computes on what, and what is done."""

from collections import deque
from dataclasses import dataclass
from typing import Any, cast, final

from evenstep.core.errors import ProtocolError
from evenstep.core.values import State

Range = tuple[int, int]
"""Positions of an epoch, the first included, the last excluded."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Positions that one worker alone computes on; `number` names the claim within its epoch."""

    number: int
    ranges: tuple[Range, ...]

    @property
    def samples(self) -> int:
        """How many positions it has."""
        return sum(stop - start for start, stop in self.ranges)

    @property
    def positions(self) -> tuple[int, ...]:
        """The positions, in the order in which they are computed on."""
        return tuple(position for start, stop in self.ranges for position in range(start, stop))


@final
class Claims:
    """Hands out the positions 0 to `length` - 1 of an epoch; each is finished exactly once.

    A claim is open until it is finished (committed) or given back (its worker left, or left the loop); what was given
    back is handed out again before anything new.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self._next = 0
        self._returned: deque[Range] = deque()
        self._open: dict[int, dict[int, Claim]] = {}
        self._number = 0
        self._finished = 0

    @property
    def unclaimed(self) -> int:
        """How many positions can be claimed now."""
        return self.length - self._next + sum(stop - start for start, stop in self._returned)

    @property
    def finished(self) -> int:
        """How many positions are done with."""
        return self._finished

    @property
    def over(self) -> bool:
        """Whether every position is finished."""
        return self._finished == self.length

    def take(self, worker: int, size: int) -> Claim | None:
        """Claim up to `size` positions; None where none is left to claim."""
        ranges: list[Range] = []
        while size > 0 and self._returned:
            start, stop = self._returned.popleft()
            cut = min(stop, start + size)
            if cut < stop:
                self._returned.appendleft((cut, stop))
            ranges.append((start, cut))
            size -= cut - start
        cut = min(self.length, self._next + size)
        if cut > self._next:
            ranges.append((self._next, cut))
            self._next = cut
        if not ranges:
            return None
        claim = Claim(number=self._number, ranges=tuple(ranges))
        self._number += 1
        self._open.setdefault(worker, {})[claim.number] = claim
        return claim

    def finish(self, worker: int, number: int) -> None:
        """The worker's work on this claim is in the parameters.

        Raises:
            ProtocolError: The worker holds no such claim.
        """
        claim = self._open.get(worker, {}).pop(number, None)
        if claim is None:
            raise ProtocolError(f"worker {worker} finished the claim {number}, which it does not hold")
        self._finished += claim.samples

    def holds(self, worker: int, number: int) -> bool:
        """Whether this claim is open and the worker's."""
        return number in self._open.get(worker, {})

    def give_back(self, worker: int, *, keep: frozenset[int] = frozenset()) -> int:
        """Return the worker's open claims, except those of these numbers; how many positions came back."""
        claims = self._open.pop(worker, {})
        kept = {number: claim for number, claim in claims.items() if number in keep}
        if kept:
            self._open[worker] = kept
        returned = [claim for number, claim in claims.items() if number not in keep]
        self._returned.extend(piece for claim in returned for piece in claim.ranges)
        return sum(claim.samples for claim in returned)

    def state_dict(self) -> State:
        """What is not finished; open claims count as given back, since nobody will hold them after a restart."""
        opened = [claim for claims in self._open.values() for claim in claims.values()]
        pieces = [*self._returned, *(piece for claim in opened for piece in claim.ranges)]
        return {"length": self.length, "next": self._next, "returned": [list(piece) for piece in sorted(pieces)]}

    def load_state_dict(self, state: State) -> None:
        """Go on where the given state was taken."""
        self.length = cast("int", state["length"])
        self._next = cast("int", state["next"])
        self._returned = deque((start, stop) for start, stop in cast("Any", state["returned"]))
        self._open = {}
        self._finished = self.length - self.unclaimed
