"""The parent's end of its connection to a group server.

Each worker behind the group server has a line, which is a virtual connection to its own session. Gradients and weights
are shared: pushes that travel together have one gradient, and each version of the weights travels once.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final, final

import torch
from msgspec import Raw

from evenstep.core.errors import ProtocolError
from evenstep.protocol import group_messages
from evenstep.protocol.encoding import decode
from evenstep.server.send_queue import SendQueue
from evenstep.tensors.messages import memory_of, zeros
from evenstep.transport.base import Connection, ConnectionLostError, Message

if TYPE_CHECKING:
    from evenstep.server.session import ServerSession
    from evenstep.server.shard_state import ShardState

MAX_LINES: Final = 2**12
"""The most lines of one group server."""
MAX_REQUEST_BYTES: Final = 2**26
"""The most bytes of requests that travel together, without their gradient."""


@final
class VirtualConnection:
    """A worker's line through a group server, as a `Connection`. It never waits, and its end is known at once."""

    local = True

    def __init__(self, uplink: "Uplink", number: int) -> None:
        self.uplink = uplink
        self._number = number
        self._message: Message | None = None
        self._ended = False

    def put(self, message: Message | None) -> None:
        """Set the message that `receive` returns; None ends the line."""
        self._message = message
        self._ended = self._ended or message is None

    def send(self, header: bytes, *payload: memoryview, files: Sequence[int] = (), wait: bool = True) -> None:
        # Also if the line has ended: its group server ignores the message, but needs the weights.
        self.uplink.send_queue.send(group_messages.ToLine(line=self._number, message=Raw(header)), *payload)

    def receive(self, timeout: float | None = None) -> Message:
        message, self._message = self._message, None
        if message is None or self._ended:
            raise ConnectionLostError("the line to the worker has ended")
        return message

    def receive_payload(self, *buffers: memoryview) -> None:
        self.uplink.connection.receive_payload(*buffers)

    def close(self) -> None:
        if not self._ended:
            self._ended = True
            self.uplink.send_queue.send(group_messages.LineClosed(line=self._number))


@final
class Uplink:
    """Passes a group server's messages to the sessions of its workers, and sends their answers.

    Args:
        connection: The connection to the group server.
        shard_state: Receives shared gradients.
        lock: Held for every call of the shard state.
        open_session: Opens the session of a worker.
        receiving: Called with True before a gradient is received for these lines, and with False afterwards. Meanwhile
            they send no pulse.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        shard_state: "ShardState",
        lock: AbstractContextManager[bool],
        open_session: Callable[[Connection], "ServerSession"],
        receiving: Callable[[Sequence[Connection], bool], None],
    ) -> None:
        self.connection = connection
        self.send_queue = SendQueue(connection)
        self._shard_state = shard_state
        self._lock = lock
        self._open_session = open_session
        self._receiving = receiving
        self._lines: dict[int, tuple[VirtualConnection, ServerSession]] = {}
        self._which: tuple[float, ...] = ()
        self._latest = torch.empty(0, dtype=torch.uint8)
        """The latest weights of any of its workers; `_which` is their version and look-ahead."""
        self._unsent: list[memoryview] = []
        """These weights, until they are sent to the group server."""

    def take(self, message: Message) -> None:
        """Carry out a message of the group server.

        Raises:
            ProtocolError, ConnectionLostError: The message is invalid.
        """
        said = decode(group_messages.FROM_GROUP, message.header)
        if isinstance(said, group_messages.Together):
            self._take_together(said, message)
        elif isinstance(said, group_messages.LineEnded):
            self._end(said)
        else:
            self._feed(said, message)

    def lost(self) -> None:
        """Handle the end of the connection, which ends every line."""
        self.send_queue.close()
        for number in list(self._lines):
            self._end(group_messages.LineEnded(line=number))

    def weights(self, which: tuple[float, ...], read: Callable[[torch.Tensor], None]) -> tuple[torch.Tensor, bool]:
        """Return a message of these weights, and whether `read` has written it now, as they are not the latest."""
        new = which != self._which
        if new:
            # New memory, since the former message may still be in the send queue.
            self._which, self._latest = which, zeros(self._shard_state.nbytes)
            read(self._latest)
            self._unsent = [memory_of(self._latest)]
        return self._latest, new

    def unsent_weights(self) -> list[memoryview]:
        """Return the latest weights as a payload, and nothing if they were sent before."""
        unsent, self._unsent = self._unsent, []
        return unsent

    def _feed(self, said: group_messages.FromLine, message: Message) -> None:
        if said.line not in self._lines:
            if len(self._lines) >= MAX_LINES:
                raise ProtocolError(f"a group server has more than {MAX_LINES} workers: start more group servers")
            line = VirtualConnection(self, said.line)
            self._lines[said.line] = line, self._open_session(line)
        line, session = self._lines[said.line]
        line.put(Message(header=bytes(said.message), payload_bytes=message.payload_bytes))
        session.serve_one()

    def _end(self, said: group_messages.LineEnded) -> None:
        line, session = self._lines.pop(said.line, (None, None))
        if line is None or session is None:
            return
        if said.hung is not None:
            session.give_up(said.hung)
        line.put(None)
        session.serve_one()

    def _take_together(self, said: group_messages.Together, message: Message) -> None:
        gradient_bytes = message.payload_bytes - sum(said.lengths)
        if sum(said.lengths) > MAX_REQUEST_BYTES or gradient_bytes not in (0, self._shard_state.nbytes):
            raise ConnectionLostError(f"a payload of {message.payload_bytes} bytes is not the push of a group")
        requests = [bytearray(length) for length in said.lengths]
        gradients = zeros(gradient_bytes)
        known = [self._lines[line] for line in said.lines if line in self._lines]
        everyone = [line for line, _ in self._lines.values()]
        self._receiving(everyone, True)
        try:
            self.connection.receive_payload(*(memoryview(each) for each in requests), memory_of(gradients))
        finally:
            self._receiving(everyone, False)
        with self._lock:
            # All or nothing: a part of a mean cannot be left out.
            if len(known) != len(requests) or not self._shard_state.share(gradients, [line for line, _ in known]):
                self.send_queue.send(group_messages.TogetherRefused(number=said.number))
                return
            for (line, session), request in zip(known, requests, strict=True):
                line.put(Message(header=bytes(request)))
                session.serve_one()
