"""Serves all workers of the server's own host in one thread, whichever of them has asked.

Their requests are small, since gradients and weights lie in shared memory, and are dealt with one at a time anyway. A
thread for each would spend longer in being woken than a small model's update takes.
"""

import os
import selectors
import threading
import time
from typing import Final, final

from evenstep.server.group.uplink import Serves
from evenstep.transport.stream import StreamConnection

PATIENCE_SECONDS: Final = 2.0
_AT_ONCE: Final = 64


@final
class LocalPoller:
    """Sessions over connections of this host; `open` may be called from any thread, `serve` from one.

    Args:
        patience_seconds: How long all may wait for one that stands still in the middle of a message; then it is lost.
    """

    def __init__(self, *, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self._patience_seconds = patience_seconds
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = os.pipe()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._arrived: list[tuple[StreamConnection, Serves]] = []
        self._changed = threading.Lock()

    def open(self, connection: StreamConnection, session: Serves) -> None:
        """Serve this connection too, until it ends."""
        connection.set_reading_patience(self._patience_seconds)
        with self._changed:
            self._arrived.append((connection, session))
        os.write(self._waker, b"x")

    def serve(self, seconds: float) -> None:
        """Serve whoever asks, for so long."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                if key.data is None:
                    os.read(self._wake, _AT_ONCE)
                    self._let_in()
                elif not key.data.serve_one() and self._serves(key.fd) is key.data:
                    self._forget(key.fd)

    def _let_in(self) -> None:
        with self._changed:
            arrived, self._arrived = self._arrived, []
        for connection, session in arrived:
            descriptor = connection.fileno()
            # One that was closed elsewhere has left its number to this one.
            self._forget(descriptor)
            self._selector.register(descriptor, selectors.EVENT_READ, session)

    def _serves(self, descriptor: int) -> object:
        """Whose it is: one that was closed elsewhere may have left its number to another, a moment ago."""
        key = self._selector.get_map().get(descriptor)
        return None if key is None else key.data

    def _forget(self, descriptor: int) -> None:
        if descriptor in self._selector.get_map():
            self._selector.unregister(descriptor)
