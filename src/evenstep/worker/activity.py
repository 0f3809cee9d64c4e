"""Keeps what this worker's main thread does, so that its pulse can tell the others."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

from evenstep.core.activity import Doing, Seen


@final
class Activity:
    """What the main thread does now and since when. The main thread marks; any thread reads.

    Args:
        clock: Seconds that do not go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._now = (Doing.PREPARING, -1, clock())

    def mark(self, doing: Doing, iteration: int) -> None:
        """The main thread does this from now on, in or after this iteration."""
        self._now = (doing, iteration, self._clock())

    @contextmanager
    def doing(self, doing: Doing) -> Iterator[None]:
        """The main thread does this meanwhile, and then goes on with what it did before."""
        before, iteration, _ = self._now
        self.mark(doing, iteration)
        try:
            yield
        finally:
            self.mark(before, iteration)

    @contextmanager
    def waiting(self, iteration: int | None = None) -> Iterator[None]:
        """The main thread waits for the others meanwhile, and then goes on with what it did before.

        It waits in the given iteration, or else in the one that it has not completed yet.
        """
        before = self._now
        self.mark(Doing.WAITING, self.read().next_iteration if iteration is None else iteration)
        try:
            yield
        finally:
            self.mark(before[0], before[1])

    def read(self) -> Seen:
        """What it does at this moment."""
        doing, iteration, since = self._now
        return Seen(doing=doing, iteration=iteration, seconds=self._clock() - since)
