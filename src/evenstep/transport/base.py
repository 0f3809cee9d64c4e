"""The interface for moving bytes between workers and servers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from evenstep.core.errors import EvenstepError


class ConnectionLostError(EvenstepError, ConnectionError):
    """The peer is gone or sent an invalid message; nothing more can be sent or received."""


class SilentError(EvenstepError, TimeoutError):
    """Nothing arrived in time; the connection is unchanged."""


@dataclass(slots=True, unsafe_hash=True, kw_only=True)
class Message:
    """A received message.

    Attributes:
        header: A record encoded by `protocol.encoding`.
        payload_bytes: The length of the payload, which is still to be received.
        files: Open file descriptors, which the receiver has to close.
    """

    # Not frozen, because that takes three times as long to construct.
    header: Final[bytes]
    payload_bytes: Final[int] = 0
    files: Final[tuple[int, ...]] = ()


class Connection(Protocol):
    """A connection between two peers. Any thread may send; one thread at a time may receive.

    `local`: both ends are on one host, so files can be passed.
    """

    local: bool

    def send(self, header: bytes, *payload: memoryview, files: Sequence[int] = (), wait: bool = True) -> None:
        """Send a whole message: its header, followed by the bytes of these contiguous buffers.

        The peer gets its own descriptors of the files; the sender's stay open. Sending waits while the peer is slow to
        receive, so at least one of two peers must be receiving. With `wait` False it does not wait for the peer, and
        a peer without room for the whole message counts as gone.

        Raises:
            ValueError: The header is empty or too long, a buffer is not contiguous, or these files cannot be sent here;
                nothing was sent.
            ConnectionLostError: The peer is gone, or received nothing for too long. `receive` still returns its earlier
                messages, and then raises this too.
        """

    def receive(self, timeout: float | None = None) -> Message:
        """Receive the next message, within `timeout` seconds. The unread payload of the last message is discarded.

        Raises:
            SilentError: No message began in time.
            ConnectionLostError: The peer is gone, fell silent in the middle of a message, or sent an invalid one.
        """

    def receive_payload(self, *buffers: memoryview) -> None:
        """Read the payload of the last message into writable buffers of exactly its total length.

        Raises:
            ValueError: The buffers have another total length; nothing was read.
            ConnectionLostError: As for `receive`.
        """

    def close(self) -> None:
        """End the connection for both peers, and wake threads that wait in it. Closing twice is harmless."""
