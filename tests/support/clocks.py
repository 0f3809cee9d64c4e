"""Waiting with a timeout, in real time or in a time that jumps to the next timeout."""

import threading
import time
from collections.abc import Callable
from typing import Protocol, final


class Clock(Protocol):
    """What threads wait by. `changed` is held while a condition is read, and while the values behind it change."""

    changed: threading.Condition

    def now(self) -> float:
        """Seconds since an arbitrary start."""

    def wait_for(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        """Whether the condition came true within `timeout` seconds (None: no limit); the caller holds `changed`."""


@final
class SystemClock:
    """Real time."""

    def __init__(self) -> None:
        self.changed = threading.Condition()

    def now(self) -> float:
        return time.monotonic()

    def wait_for(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        return self.changed.wait_for(condition, timeout)


@final
class FakeClock:
    """Time that stands still while a thread works, and jumps to the next timeout when all `threads` wait.

    A timeout costs no time, and it never fires because the machine was slow. Threads that all wait without a timeout
    wait forever.
    """

    def __init__(self, *, threads: int = 1) -> None:
        self.changed = threading.Condition()
        self._threads = threads
        self._now = 0.0
        self._waiting: list[tuple[Callable[[], bool], float | None]] = []

    def now(self) -> float:
        return self._now

    def wait_for(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        end = None if timeout is None else self._now + timeout
        waiting = (condition, end)
        self._waiting.append(waiting)
        try:
            while not condition():
                if end is not None and self._now >= end:
                    return False
                if not self._jump():
                    self.changed.wait()
            return True
        finally:
            self._waiting.remove(waiting)

    def leave(self) -> None:
        """A thread that used this clock has ended."""
        with self.changed:
            self._threads -= 1
            self.changed.notify_all()

    def _jump(self) -> bool:
        """Jump to the first timeout if all threads wait and none can continue; return whether time has changed."""
        ends = [end for _, end in self._waiting if end is not None]
        if len(self._waiting) < self._threads or not ends or min(ends) <= self._now:
            return False
        if any(condition() for condition, _ in self._waiting):
            return False
        self._now = min(ends)
        self.changed.notify_all()
        return True
