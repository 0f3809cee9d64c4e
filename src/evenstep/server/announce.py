"""What a server tells the process that started it: where it listens, that it lives, and which workers come and go."""

import json
import os
import select
import threading
from collections import deque
from collections.abc import Mapping
from typing import Final, final

BEATS: Final = 8
"""A server says so many times in a heartbeat that it lives."""


@final
class Announcements:
    """Lines to the parent process: JSON, or empty ones for beats. Any thread may call; no call waits.

    A parent that does not read for long misses beats, but no event.

    Args:
        descriptor: A pipe or socket to the parent.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._waiting: deque[bytes] = deque()
        self._gone = False

    def tell(self, event: Mapping[str, object]) -> None:
        """Say this, after all that was said before."""
        with self._lock:
            self._waiting.append(json.dumps(event).encode() + b"\n")
            self._flush()

    def beat(self) -> None:
        """Say that this process lives."""
        with self._lock:
            if not self._waiting:
                self._waiting.append(b"\n")
            self._flush()
            if self._waiting and self._waiting[-1] == b"\n":
                self._waiting.pop()

    def beat_until(self, ended: threading.Event, heartbeat_seconds: float) -> None:
        """Beat until this process is to end; to be run in a thread."""
        while not ended.wait(heartbeat_seconds / BEATS):
            self.beat()

    def _flush(self) -> None:
        while self._waiting and not self._gone:
            # A line is shorter than what a pipe that is writable takes at once.
            if not select.select([], [self._descriptor], [], 0)[1]:
                return
            try:
                os.write(self._descriptor, self._waiting[0])
            except OSError:  # The parent has closed its end; this process sees the end of its input and ends.
                self._gone = True
            else:
                self._waiting.popleft()
