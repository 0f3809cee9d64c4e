"""Sends messages in a separate thread, so that the caller need not wait for a slow peer."""

import queue
import threading
from typing import final

from evenstep.transport.base import Connection, ConnectionLostError, Header
from evenstep.transport.codec import encode_header


@final
class SendQueue:
    """What is to be sent over one connection, in its order; its buffers must stay as they are."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._waiting: queue.SimpleQueue[tuple[Header, tuple[memoryview, ...]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._send_all, name="evenstep-send-queue", daemon=True).start()

    def send(self, header: Header, *payload: memoryview) -> None:
        """Send this after all that was given before; nothing happens where the peer is gone.

        Raises:
            ValueError: It is no message; nothing is sent.
        """
        encode_header(header)
        self._waiting.put((header, payload))

    def send_last(self, header: Header, *payload: memoryview) -> None:
        """Send this, and no more."""
        self.send(header, *payload)
        self.close()

    def close(self) -> None:
        """Send what was given, and no more."""
        self._waiting.put(None)

    def _send_all(self) -> None:
        try:
            while (message := self._waiting.get()) is not None:
                header, payload = message
                self._connection.send(header, *payload)
        except ConnectionLostError:
            return  # The thread that receives from the peer notices it too and handles it.
        except BaseException:
            self._connection.close()
            raise
