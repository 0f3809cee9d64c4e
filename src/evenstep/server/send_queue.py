"""Sends messages in a separate thread, so that the caller does not wait for a slow peer."""

import queue
import threading
from typing import final

from evenstep.protocol.encoding import Record, encode
from evenstep.transport.base import Connection, ConnectionLostError
from evenstep.transport.codec import check_sendable


@final
class SendQueue:
    """Sends messages over one connection, in order. Their payloads must not change afterwards."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._waiting: queue.SimpleQueue[tuple[bytes, tuple[memoryview, ...]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._send_all, name="evenstep-send-queue", daemon=True).start()

    def send(self, message: Record, *payload: memoryview) -> None:
        """Send a message after all earlier ones. If the peer is gone, nothing happens.

        Raises:
            ValueError: The message is too long; nothing is sent.
        """
        header = encode(message)
        check_sendable(header, ())
        self._waiting.put((header, payload))

    def send_last(self, message: Record, *payload: memoryview) -> None:
        """Send a last message."""
        self.send(message, *payload)
        self.close()

    def close(self) -> None:
        """End the thread once it has sent all messages."""
        self._waiting.put(None)

    def _send_all(self) -> None:
        try:
            while (message := self._waiting.get()) is not None:
                header, payload = message
                self._connection.send(header, *payload)
        except ConnectionLostError:
            return  # The thread that receives from the peer handles it.
        except BaseException:
            self._connection.close()
            raise
