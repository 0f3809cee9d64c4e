"""The parent's end of its connection to a group server: a line for each worker behind it, weights and gradients once.

What a worker asks for comes over its line as it would over a connection of its own, to a session of its own. What is
heavy is shared: one gradient comes for pushes that travel as one, and weights go to the group server if it has others.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Final, Protocol, final

import torch

from evenstep.core.errors import ProtocolError
from evenstep.protocol.fields import Fields
from evenstep.server.send_queue import SendQueue
from evenstep.tensors.memory import memory_of
from evenstep.transport.base import Connection, ConnectionLostError, Header, Message
from evenstep.transport.codec import decode_header

MAX_LINES: Final = 2**12
"""The most workers behind one group server."""
MAX_REQUEST_BYTES: Final = 2**26
"""The most that the requests which travel as one take, beside their gradient."""


class Serves(Protocol):
    """A session, over a connection that it was given."""

    def serve_one(self) -> bool:
        """Do what the next message asks for; False where the connection has ended, and is done with."""


class Seats(Protocol):
    """Of a shard state, what an uplink needs."""

    @property
    def nbytes(self) -> int: ...

    def share(self, gradients: torch.Tensor, connections: Sequence[Connection]) -> bool:
        """These gradients are in the places of the workers reached over these; False, and nothing, if one has none."""


@final
class VirtualConnection:
    """One worker's line through a group server, as a `Connection`: it never waits, and its end is known at once."""

    local = True

    def __init__(self, uplink: "Uplink", number: int) -> None:
        self.uplink = uplink
        self._number = number
        self._message: Message | None = None
        self._ended = False

    def put(self, message: Message | None) -> None:
        """What is received next; None: the line has ended."""
        self._message = message
        self._ended = self._ended or message is None

    def send(self, header: Header, *payload: memoryview, files: Sequence[int] = (), wait: bool = True) -> None:
        if self._ended:
            raise ConnectionLostError("the line to the worker has ended")
        self.uplink.send({**header, "line": self._number}, *payload)

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
            self.uplink.send({"line": self._number, "ended": True})


@final
class Uplink:
    """Takes a group server's messages apart, and sends its workers' answers; `take` by one thread at a time.

    Args:
        connection: To the group server.
        shard_state: What is shared goes into its places.
        lock: Held for every call of the shard state.
        open_session: Makes the session of a worker.
        receiving: Is told whether much is on its way from these lines, whose silence means nothing then.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        shard_state: Seats,
        lock: AbstractContextManager[bool],
        open_session: Callable[[Connection], Serves],
        receiving: Callable[[Sequence[Connection], bool], None],
    ) -> None:
        self.connection = connection
        self._shard_state = shard_state
        self._lock = lock
        self._open_session = open_session
        self._receiving = receiving
        self._lines: dict[int, tuple[VirtualConnection, Serves]] = {}
        self._send_queue = SendQueue(connection)
        self._weights: tuple[tuple[float, ...], torch.Tensor] | None = None
        """The latest that any of its workers was given, and what tells them from others."""
        self._sent = False
        """Whether the group server has them."""

    def take(self, fields: Fields, message: Message) -> None:
        """Do what the group server says, or what a worker behind it asks for.

        Raises:
            ProtocolError, ConnectionLostError: It makes no sense.
        """
        operation = fields.text("op")
        if operation == "together":
            self._together(fields, message)
        elif operation == "end":
            self._end(fields)
        else:
            self._feed(fields.whole("line"), message)

    def lost(self) -> None:
        """The group server is gone, and with it all lines."""
        self._send_queue.close()
        for number in list(self._lines):
            self._end(Fields({"line": number}))

    @property
    def latest(self) -> torch.Tensor | None:
        """The message of weights that the group server was given last."""
        return None if self._weights is None else self._weights[1]

    def weights(self, what: tuple[float, ...], read: Callable[[torch.Tensor], None]) -> torch.Tensor:
        """The weights that are known by `what`, which `read` writes into a message; the same for all who ask in a row.

        A new message each time that they are others, since the former may still be on its way.
        """
        if self._weights is None or self._weights[0] != what:
            message = torch.empty(self._shard_state.nbytes, dtype=torch.uint8)
            read(message)
            self._weights, self._sent = (what, message), False
        return self._weights[1]

    def send(self, header: Header, *payload: memoryview) -> None:
        """Send this to the group server, after all before; weights that it has do not go again."""
        if header.get("weights"):
            payload, self._sent = () if self._sent else payload, True
        self._send_queue.send(header, *payload)

    def _feed(self, number: int, message: Message) -> None:
        if number not in self._lines:
            if len(self._lines) >= MAX_LINES:
                raise ProtocolError(f"a group server has more than {MAX_LINES} workers: start more of them")
            line = VirtualConnection(self, number)
            self._lines[number] = line, self._open_session(line)
        line, session = self._lines[number]
        line.put(message)
        session.serve_one()

    def _end(self, fields: Fields) -> None:
        """The line has ended; `hung` tells for how long its worker kept the others of its group waiting."""
        line, session = self._lines.pop(fields.whole("line"), (None, None))
        if line is None or session is None:
            return
        if fields.has("hung"):
            line.put(Message(header={"op": "hung", "seconds": fields.number("hung")}))
            session.serve_one()
        line.put(None)
        session.serve_one()

    def _together(self, fields: Fields, message: Message) -> None:
        """Several workers' requests, and one gradient that stands for all of theirs, or the weights to begin with."""
        number = fields.whole("number")
        lengths = fields.listed_wholes("lengths")
        gradient_bytes = message.payload_bytes - sum(lengths)
        if sum(lengths) > MAX_REQUEST_BYTES or gradient_bytes not in (0, self._shard_state.nbytes):
            raise ConnectionLostError(f"a payload of {message.payload_bytes} bytes is no group's push")
        requests = [bytearray(length) for length in lengths]
        gradients = torch.empty(gradient_bytes, dtype=torch.uint8)
        known = [self._lines.get(line) for line in fields.listed_wholes("lines")]
        lines = [each[0] for each in known if each is not None]
        everyone = [line for line, _ in self._lines.values()]
        self._receiving(everyone, True)
        try:
            self.connection.receive_payload(*(memoryview(each) for each in requests), memory_of(gradients))
        finally:
            self._receiving(everyone, False)
        with self._lock:
            # All or nothing: of a sum no part can be left out.
            if len(lines) != len(requests) or not self._shard_state.share(gradients, lines):
                self._send_queue.send({"refused": number})
                return
            for each, request in zip(known, requests, strict=True):
                assert each is not None
                each[0].put(Message(header=decode_header(memoryview(request))))
                each[1].serve_one()
