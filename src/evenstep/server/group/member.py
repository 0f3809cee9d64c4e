"""One worker's connection to the server of its group: reads what comes, and has the group do it."""

import traceback
from typing import Protocol, final

from evenstep.core.errors import EvenstepError, ProtocolError
from evenstep.protocol.fields import Fields
from evenstep.server.worker_slot import WorkerSlot, refused
from evenstep.transport.base import Connection, ConnectionLostError, Message


class Serving(Protocol):
    """What does what its members ask for."""

    def asked(self, member: "GroupMember", fields: Fields, message: Message) -> None:
        """Do what the worker asks for, or have the parent do it.

        Raises:
            ProtocolError, ConnectionLostError: It makes no sense, or cannot be done now.
        """

    def lost(self, member: "GroupMember") -> None:
        """The worker's connection has ended, and so has the worker, or it will start anew."""


@final
class GroupMember:
    """A worker as its group server sees it; `serve` runs in a thread of its own.

    Attributes:
        connection: To the worker.
        line: What the group server and its parent know this connection by.
        rank, process: The worker's, and its process's number on this host, once it has asked for its place.
        done: Whether it has said goodbye.
        request: What it pushed last, as the parent will read it.
        gone: Whether nothing that still comes from it counts.
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
        """Its place.

        Raises:
            ProtocolError: It has none, or not any more.
        """
        if self._slot is None:
            raise ProtocolError("the worker has not started here, or was given up for dead: start anew")
        return self._slot

    @property
    def started(self) -> bool:
        """Whether it has a place."""
        return self._slot is not None

    def take_place(self, incarnation: int, nbytes: int) -> WorkerSlot:
        """Give it one, as this incarnation."""
        self._slot = WorkerSlot(self.line, incarnation, nbytes, self.connection)
        return self._slot

    def is_new(self, sequence: int) -> bool:
        """Whether this request has not been taken in before; if it was answered, it is once more."""
        if sequence > self.slot.sequence:
            self.slot.take_in(sequence)
            return True
        if sequence == self.slot.sequence:
            self.slot.resend()
        return False

    def leave(self) -> None:
        """Its place is free, and its connection ends."""
        self.gone = True
        slot, self._slot = self._slot, None
        if slot is not None:
            slot.close()
        self.connection.close()

    def serve(self) -> None:
        """Until the connection ends."""
        while self.serve_one():
            pass

    def serve_one(self) -> bool:
        """Wait for a message and do what it asks for; False where the connection has ended, and is done with."""
        try:
            message = self.connection.receive()
            try:
                self._group.asked(self, Fields(message.header), message)
            except ConnectionLostError:
                raise
            except Exception as error:
                # The worker must hear of it, whatever it is, instead of asking again for ever.
                if not isinstance(error, EvenstepError):
                    traceback.print_exc()
                self._refuse(Fields(message.header), error)
        except ConnectionLostError:
            self.connection.close()
            self._group.lost(self)
            return False
        return True

    def _refuse(self, fields: Fields, error: Exception) -> None:
        """Answer with the error."""
        refusal = refused(self._slot, fields, error)
        if refusal is not None:
            self.connection.send(refusal, wait=False)
