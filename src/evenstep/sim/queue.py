"""What is to happen when: the events of a simulation, in one order that nothing but their values decides."""

from enum import IntEnum
from functools import partial
from heapq import heappop, heappush
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Callable

Event = tuple[float, int, int, int]
"""Its time in seconds, its `Kind`, its worker, and the worker's incarnation that it is meant for."""


class Kind(IntEnum):
    """What happens; of what happens at the same moment, the lower first."""

    LEAVE = 0
    JOIN = 1
    ANSWER = 2
    ASK = 3
    PUSH = 4
    COMPUTED = 5


@final
class Events:
    """A heap of events, ordered by time, then by kind, then by the worker's rank, then by its incarnation.

    In a real run nothing orders what happens at the same moment; here those who leave come first, then those who join,
    answers that reach workers, requests for work, pushes that reach servers, and the ends of computations, each in
    order of rank. Times are compared as they are: two events are simultaneous only where their times are one number.
    """

    __slots__ = ("add", "heap", "pop")

    def __init__(self) -> None:
        self.heap: list[Event] = []
        """All of them; to be read only."""
        # As they are, since a method around each would take as long again.
        self.add: Callable[[Event], None] = partial(heappush, self.heap)
        """This is to happen."""
        self.pop: Callable[[], Event] = partial(heappop, self.heap)
        """What happens next."""
