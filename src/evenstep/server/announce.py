"""What a server reports to its parent process: its addresses, heartbeats, and workers that join or leave."""

import json
import os
import select
import threading
from collections import deque
from collections.abc import Mapping
from typing import Final, final

BEATS: Final = 8
"""Reports per heartbeat that a server is alive."""


@final
class Announcements:
    """Writes lines to the parent process: JSON, or empty lines as beats. Any thread may call; no call waits.

    A parent that does not read for a long time misses beats, but no event.

    Args:
        descriptor: A pipe or socket to the parent.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._waiting: deque[bytes] = deque()
        self._gone = False

    def tell(self, event: Mapping[str, object]) -> None:
        """Report an event, after all earlier ones."""
        with self._lock:
            self._waiting.append(json.dumps(event).encode() + b"\n")
            self._flush()

    def beat(self) -> None:
        """Report that this process is alive."""
        with self._lock:
            if not self._waiting:
                self._waiting.append(b"\n")
            self._flush()
            if self._waiting and self._waiting[-1] == b"\n":
                self._waiting.pop()

    def beat_until(self, ended: threading.Event, heartbeat_seconds: float) -> None:
        """Beat until `ended` is set; to be run in a thread."""
        while not ended.wait(heartbeat_seconds / BEATS):
            self.beat()

    def _flush(self) -> None:
        while self._waiting and not self._gone:
            # A writable pipe accepts a whole line at once.
            if not select.select([], [self._descriptor], [], 0)[1]:
                return
            try:
                os.write(self._descriptor, self._waiting[0])
            except OSError:  # The parent has closed its end; this process ends when it sees the end of its input.
                self._gone = True
            else:
                self._waiting.popleft()
