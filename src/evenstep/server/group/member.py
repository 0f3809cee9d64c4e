"""The session of a worker at its group server."""

from typing import TYPE_CHECKING, final

from evenstep.core.errors import ProtocolError
from evenstep.protocol.encoding import decode
from evenstep.protocol.messages import ASKED
from evenstep.server.server_slot import ServerSlot, refused
from evenstep.server.serving import serve_one
from evenstep.transport.base import Connection, Message

if TYPE_CHECKING:
    from evenstep.server.group.group import ServedGroup


@final
class GroupMember:
    """A worker at its group server.

    Attributes:
        connection: The connection to the worker.
        line: The number of this connection at the group server and its parent.
        rank: The worker's rank; -1 until it has asked for a place.
        done: Whether it has said goodbye.
        request: Its last push, encoded.
        gone: Whether later messages of the worker are ignored.
    """

    def __init__(self, group: "ServedGroup", connection: Connection, line: int) -> None:
        self.connection = connection
        self.line = line
        self.rank = -1
        self.done = False
        self.request = b""
        self.gone = False
        self._slot: ServerSlot | None = None
        self._group = group

    @property
    def slot(self) -> ServerSlot:
        """The slot of the worker; ProtocolError if it has none, or none any more."""
        if self._slot is None:
            raise ProtocolError("the worker has not joined here, or was given up: join again")
        return self._slot

    @property
    def started(self) -> bool:
        """True if the worker has a slot."""
        return self._slot is not None

    def take_place(self, incarnation: int, nbytes: int) -> ServerSlot:
        """Give the worker a slot, as this incarnation."""
        self._slot = ServerSlot(self.line, incarnation, nbytes, self.connection)
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
