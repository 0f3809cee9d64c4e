"""A server's reports to its parent: addresses, heartbeats, workers that come and go, and whether any is here."""

import json
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final, final

BEATS: Final = 8
"""Reports per heartbeat that a server is alive."""


@final
class Announcements:
    """Writes lines to the parent process: JSON, or empty lines as beats.

    Args:
        descriptor: A pipe or socket to the parent.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._events: SimpleQueue[Mapping[str, object]] = SimpleQueue()

    def tell(self, event: Mapping[str, object]) -> None:
        """Report an event, after all earlier ones. Any thread may call this, and it does not wait for the parent."""
        self._events.put(event)

    def write(self, heartbeat_seconds: float) -> None:
        """Write events as they come, and beats between them. Call it in a thread."""
        with suppress(OSError):  # The parent has closed its end; this process ends when it sees the end of its input.
            while True:
                line = ""
                with suppress(Empty):
                    # A beat follows each event, too: from the addresses on, silence is noticed.
                    line = json.dumps(self._events.get(timeout=heartbeat_seconds / BEATS)) + "\n"
                os.write(self._descriptor, f"{line}\n".encode())

    def answer(self, source: int, present: Callable[[], Mapping[str, object]], orphaned: threading.Event) -> None:
        """Report `present()` whenever the parent writes to the input. Call it in a thread.

        Args:
            source: The input.
            present: Returns whether any worker is `here`, and more about those that are not.
            orphaned: Set when the parent has ended, which closes the input.
        """
        with suppress(OSError):  # If the input is a socket, its end can be an error.
            while os.read(source, 4096):
                self.tell({"event": "present", **present()})
        orphaned.set()
