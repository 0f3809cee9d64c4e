"""The exactly-once ledger of an epoch that workers share without a barrier: who computes on what, and what is done."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, cast, final

from evenstep.core.errors import ProtocolError
from evenstep.core.values import State

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
        unclaimed: how many of them can be claimed now.
        finished: how many are finished.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.unclaimed = length
        self.finished = 0
        self._next = 0
        self._number = 0
        self._returned: deque[Range] = deque()
        self._open: dict[int, tuple[int, Claim]] = {}  # Worker and claim by number.

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
            self.unclaimed += claim.samples

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
        """Continue where the given state was taken."""
        self.length = cast("int", state["length"])
        self._next = cast("int", state["next"])
        self._number = cast("int", state["number"])
        self._returned = deque((start, stop) for start, stop in cast("list[Range]", state["returned"]))
        self._open = {}
        self.unclaimed = self.length - self._next + sum(stop - start for start, stop in self._returned)
        self.finished = self.length - self.unclaimed


def _append(ranges: list[Range], piece: Range) -> None:
    """Add the piece, joined with the last one if it continues it, so that pieces do not become ever smaller."""
    if ranges and ranges[-1][1] == piece[0]:
        piece = (ranges.pop()[0], piece[1])
    ranges.append(piece)
