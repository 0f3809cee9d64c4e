"""Serves all workers on the server's host in one thread.

Their requests are small, since gradients and weights are in shared memory, and only one is carried out at a time.
Waking a thread for each worker would take longer than the update of a small model.
"""

import os
import selectors
import threading
import time
from typing import Final, final

from evenstep.server.serving import Serves
from evenstep.transport.stream import StreamConnection

PATIENCE_SECONDS: Final = 2.0
_AT_ONCE: Final = 64


@final
class LocalPoller:
    """Serves connections of this host. `open` may be called from any thread, `serve` from one.

    Args:
        patience_seconds: How long a worker may pause in the middle of a message, while the others wait.
    """

    def __init__(self, *, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self._patience_seconds = patience_seconds
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = os.pipe()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._arrived: list[tuple[StreamConnection, Serves]] = []
        self._changed = threading.Lock()

    def open(self, connection: StreamConnection, session: Serves) -> None:
        """Serve this connection too."""
        connection.set_reading_patience(self._patience_seconds)
        with self._changed:
            self._arrived.append((connection, session))
        os.write(self._waker, b"x")

    def serve(self, seconds: float) -> None:
        """Serve requests for this long."""
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
            # The descriptor may have belonged to a connection that another thread closed.
            self._forget(descriptor)
            self._selector.register(descriptor, selectors.EVENT_READ, session)

    def _serves(self, descriptor: int) -> object:
        """Return the session of this descriptor, which may have been closed and reused a moment ago."""
        key = self._selector.get_map().get(descriptor)
        return None if key is None else key.data

    def _forget(self, descriptor: int) -> None:
        if descriptor in self._selector.get_map():
            self._selector.unregister(descriptor)
