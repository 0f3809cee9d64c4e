"""Tracks what this worker's main thread does, for the pulse that the other workers see."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter
from typing import final

from evenstep.core.activity import Doing, Seen, next_iteration


@final
class Activity:
    """Tracks what the main thread does and since when. The main thread writes it; any thread may read it.

    Attributes:
        now: Its activity, in or after which iteration, and since when by the clock.
        left: The iteration after which it last left a loop over the loader; -1 if it never has.

    Args:
        clock: Returns seconds that do not go back.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self.now = (Doing.PREPARING, -1, clock())
        self.left = -1

    def mark(self, doing: Doing, iteration: int) -> None:
        """Note that the main thread does this from now on, in or after this iteration."""
        self.now = (doing, iteration, self._clock())

    @contextmanager
    def doing(self, doing: Doing, iteration: int | None = None) -> Iterator[None]:
        """While this is open, the main thread does this, in the given iteration or else the current one."""
        before, present, _ = self.now
        self.mark(doing, present if iteration is None else iteration)
        try:
            yield
        finally:
            self.mark(before, present)

    def waiting(self, iteration: int | None = None) -> AbstractContextManager[None]:
        """While this is open, the main thread waits for the others, in this or the first incomplete iteration."""
        doing, present, _ = self.now
        return self.doing(Doing.WAITING, next_iteration(doing, present) if iteration is None else iteration)

    def read(self) -> Seen:
        """Return what the main thread does at this moment."""
        doing, iteration, since = self.now
        return Seen(doing=doing, iteration=iteration, seconds=self._clock() - since, left=self.left)
