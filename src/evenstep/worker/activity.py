"""What this worker's main thread does, for the pulse that the other workers see."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import final

from evenstep.core.activity import Doing, Seen, next_iteration


@final
class Activity:
    """What the main thread does and since when. The main thread writes it; any thread may read it.

    Attributes:
        now: What it does, in or after which iteration, and since when.

    Args:
        clock: Returns seconds that do not go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.now = (Doing.PREPARING, -1, clock())

    def mark(self, doing: Doing, iteration: int) -> None:
        """The main thread does this from now on, in or after this iteration."""
        self.now = (doing, iteration, self._clock())

    def doing(self, doing: Doing, iteration: int | None = None) -> AbstractContextManager[None]:
        """The main thread does this while the context is open, in the given iteration or else the present one."""
        return _While(self, doing, iteration)

    def waiting(self, iteration: int | None = None) -> AbstractContextManager[None]:
        """The main thread waits for the others, in the given iteration or else the first that it has not completed."""
        doing, present, _ = self.now
        return _While(self, Doing.WAITING, next_iteration(doing, present) if iteration is None else iteration)

    def read(self) -> Seen:
        """What the main thread does at this moment."""
        doing, iteration, since = self.now
        return Seen(doing=doing, iteration=iteration, seconds=self._clock() - since)


@final
class _While(AbstractContextManager[None]):
    """Marks what the main thread does while it is open, and afterwards what it did before."""

    def __init__(self, activity: Activity, doing: Doing, iteration: int | None) -> None:
        self._activity = activity
        self._doing = doing
        self._iteration = iteration

    def __enter__(self) -> None:
        self._before = self._activity.now
        self._activity.mark(self._doing, self._before[1] if self._iteration is None else self._iteration)

    def __exit__(self, *exception: object) -> None:
        self._activity.mark(*self._before[:2])
