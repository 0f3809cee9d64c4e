"""A worker's connection to one server, and its buffers of gradients and weights there."""

from collections.abc import Callable, Sequence
from typing import NoReturn, final

import numpy as np

from evenstep.core.errors import ConfigError, DisagreementError, EvenstepError, ProtocolError
from evenstep.protocol import messages
from evenstep.protocol.encoding import decode, encode
from evenstep.transport.base import Connection, ConnectionLostError, Message
from evenstep.transport.codec import close_files
from evenstep.transport.segment import open_segment

_ERRORS = {each.__name__: each for each in (ConfigError, DisagreementError, ProtocolError)}


@final
class RemoteShard:
    """A server, and this worker's place there.

    Attributes:
        connect: Connects to the shard of an index.
        incarnation: The worker's incarnation that has the place.
        shared: Whether this and the server share memory.
        gradients, weights: A message each, uint8; on one host they are shared with the server.
        payload: The message of gradients in pieces, if it is not in `gradients`.
        narrow_bytes: The length of a message on a narrow wire.
        differences: What has arrived on a narrow wire and is to be added to `weights`, in order.
        arriving: What has arrived of the answer to the pending request.
    """

    def __init__(self, index: int, connect: Callable[[int], Connection]) -> None:
        self.index = index
        self.connect = connect
        self.connection: Connection | None = None
        self.shared = False
        self.incarnation = -1
        self.gradients = self.weights = np.empty(0, dtype=np.uint8)
        self.payload: list[memoryview] | None = None
        self.narrow_bytes = 0
        self.differences: list[bytearray] = []
        self.arriving: bytearray | None = None

    def reach(self) -> None:
        """Connect, if there is no connection."""
        if self.connection is None:
            self.connection = self.connect(self.index)

    def send(self, message: messages.Asked, *payload: memoryview) -> None:
        """Send a message; ConnectionLostError if the connection was closed."""
        self._open().send(encode(message), *payload)

    def receive(self, timeout: float) -> tuple[messages.Answered, Message]:
        """Receive the next message; errors as for `Connection.receive`, and ProtocolError."""
        message = self._open().receive(max(0.0, timeout))
        try:
            return decode(messages.ANSWERED, message.header), message
        except EvenstepError:
            close_files(message.files)
            raise

    def receive_payload(self, *buffers: memoryview) -> None:
        """Like `Connection.receive_payload`."""
        self._open().receive_payload(*buffers)

    def take_place(self, files: Sequence[int], nbytes: int, incarnation: int) -> None:
        """Use the shared memory that came with the answer, or private memory if none came."""
        self.shared = False
        self.incarnation = incarnation
        self.differences.clear()
        if files:
            # The arrays keep the mapping: parameters still live in it after `close`.
            both = np.frombuffer(open_segment(files[0], 2 * nbytes), dtype=np.uint8)
            self.shared = True
        else:
            both = np.zeros(2 * nbytes, dtype=np.uint8)
        self.gradients, self.weights = both[:nbytes], both[nbytes:]

    def close(self) -> None:
        """End the connection. Shared memory lives as long as it is viewed."""
        if self.connection is not None:
            self.connection.close()
        self.connection = None
        self.shared = False

    def forget(self) -> None:
        """Close, and drop all buffers, since this object may be kept for long."""
        self.close()
        self.gradients = self.weights = np.empty(0, dtype=np.uint8)
        self.payload = None

    def _open(self) -> Connection:
        if self.connection is None:
            raise ConnectionLostError(f"the connection to server {self.index} was closed")
        return self.connection


def raise_refusal(refusal: messages.Refusal) -> NoReturn:
    """Raise the error of a refusal."""
    raise _ERRORS.get(refusal.kind, ProtocolError)(refusal.error)
