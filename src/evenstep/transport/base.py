"""The interface of what moves bytes between workers and servers; nothing else."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from evenstep.core.errors import EvenstepError

Header: TypeAlias = Mapping[str, object]
"""What a message says, as msgpack carries it: None, bool, int, float, str, bytes, and lists and maps of these."""


class ConnectionLostError(EvenstepError, ConnectionError):
    """The peer is gone, or what it sent was no message: nothing more can be sent or received."""


class SilentError(EvenstepError, TimeoutError):
    """Nothing arrived within the time given; the connection is as it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message whose payload, if any, still waits: `payload_bytes` of it.

    `files` are open file descriptors, which now belong to whoever received the message.
    """

    header: Header
    payload_bytes: int = 0
    files: tuple[int, ...] = ()


class Connection(Protocol):
    """One line between two peers. Any thread may send; one at a time may receive.

    Attributes:
        local: Both ends are on one host and files can be passed.
    """

    local: bool

    def send(self, header: Header, *payload: memoryview, files: Sequence[int] = (), wait: bool = True) -> None:
        """Send a message, whole: its header, and the bytes of these contiguous buffers behind it.

        The peer gets descriptors of its own of the files; the sender's stay open. Sending waits for a peer that is slow
        to take the message in: of two peers, at least one must be receiving. With `wait` False it does not wait: a peer
        that has no room for the whole message counts as gone.

        Raises:
            ValueError: The header holds other than plain values or is too long, a buffer is not contiguous, or files
                cannot go over this line, or not so many; nothing was sent.
            ConnectionLostError: The peer is gone, or took nothing in for too long. What it had sent before can still be
                received; then `receive` raises this too.
        """

    def receive(self, timeout: float | None = None) -> Message:
        """The next message, within so many seconds; what was not read of the payload before is thrown away.

        Raises:
            SilentError: None began within the time.
            ConnectionLostError: The peer is gone, fell silent in the middle of a message, or sent what is none.
        """

    def receive_payload(self, *buffers: memoryview) -> None:
        """Read the payload of the message received last into these writable buffers, which hold it exactly.

        Raises:
            ValueError: They do not; nothing was read.
            ConnectionLostError: As for `receive`.
        """

    def close(self) -> None:
        """End the connection, here and for the peer; a thread that waits in it is woken. Closing twice is fine."""


class Listener(Protocol):
    """Where peers connect. `addresses` says how to reach it, the best first."""

    addresses: tuple[str, ...]

    def accept(self) -> Connection:
        """The next peer that has shown that it knows the secret.

        Raises:
            ConnectionLostError: The listener was closed.
        """

    def close(self) -> None:
        """Accept no more; a thread that waits in `accept` is woken."""
