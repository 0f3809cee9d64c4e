"""The session of a worker at its group server."""

from typing import Protocol, final

from evenstep.core.errors import ProtocolError
from evenstep.protocol.encoding import decode
from evenstep.protocol.messages import ASKED, Asked
from evenstep.server.serving import serve_one
from evenstep.server.worker_slot import WorkerSlot, refused
from evenstep.transport.base import Connection, Message


class Serving(Protocol):
    """The part of a group that its members need."""

    def asked(self, member: "GroupMember", asked: Asked, message: Message) -> None:
        """Carry out a request, or pass it to the parent.

        Raises:
            ProtocolError, ConnectionLostError: The request is invalid, or not possible now.
        """

    def lost(self, member: "GroupMember") -> None:
        """The worker's connection has ended. The worker has ended too, or will join again."""


@final
class GroupMember:
    """A worker at its group server.

    Attributes:
        connection: The connection to the worker.
        line: The number of this connection at the group server and its parent.
        rank, process: The worker's rank and process id; -1 until it has asked for a place.
        done: Whether it has said goodbye.
        request: Its last push, encoded.
        gone: Whether later messages of the worker are ignored.
    """

    def __init__(self, group: Serving, connection: Connection, line: int) -> None:
        self.connection = connection
        self.line = line
        self.rank = self.process = -1
        self.done = False
        self.request = b""
        self.gone = False
        self._slot: WorkerSlot | None = None
        self._group = group

    @property
    def slot(self) -> WorkerSlot:
        """The slot of the worker; ProtocolError if it has none (any more)."""
        if self._slot is None:
            raise ProtocolError("the worker has not joined here, or was given up: join again")
        return self._slot

    @property
    def started(self) -> bool:
        """Whether the worker has a slot."""
        return self._slot is not None

    def take_place(self, incarnation: int, nbytes: int) -> WorkerSlot:
        """Give the worker a slot, as this incarnation."""
        self._slot = WorkerSlot(self.line, incarnation, nbytes, self.connection)
        return self._slot

    def is_new(self, sequence: int) -> bool:
        """Accept a request if it is new; a repeated one is answered again if it was answered."""
        new = self.slot.is_new(sequence)
        if new:
            self.slot.take_in(sequence)
        return new

    def leave(self) -> None:
        """Free the slot and end the connection."""
        self.gone = True
        slot, self._slot = self._slot, None
        if slot is not None:
            slot.close()
        self.connection.close()

    def serve_one(self) -> bool:
        return serve_one(self.connection, self._take, self._refuse, lambda: self._group.lost(self))

    def _take(self, message: Message) -> None:
        self._group.asked(self, decode(ASKED, message.header), message)

    def _refuse(self, message: Message, error: Exception) -> None:
        refusal = refused(self._slot, message.header, error)
        if refusal is not None:
            self.connection.send(refusal, wait=False)
