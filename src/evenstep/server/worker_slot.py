"""A worker's place at a server: its two message buffers, and the request it is at. It outlives a connection."""

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, final

import numpy as np
import torch

from evenstep.core.errors import ProtocolError
from evenstep.protocol.fields import Fields
from evenstep.server.group.uplink import VirtualConnection
from evenstep.tensors.memory import memory_of
from evenstep.transport.base import Connection, ConnectionLostError, Header
from evenstep.transport.segment import Segment

if TYPE_CHECKING:
    from evenstep.protocol.optimizer import Options


@final
class WorkerSlot:
    """Where one incarnation of a worker puts gradients and finds weights.

    On one host both buffers are one shared segment; else they are private, and their bytes travel with the messages. A
    worker behind a group server has none and uses the group's.

    Attributes:
        gradients, weights: A message each, uint8.
        travels: Whether gradients come with the message that says so, and are not in their place before.
        sequence: That of the last request taken in, so that one that comes again is not taken in twice.
        connection: Where it is reached; None while it is not.
    """

    def __init__(self, worker: int, incarnation: int, nbytes: int, connection: Connection) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self.connection: Connection | None = connection
        self.sequence = 0
        self.version = -1
        """The version of the weights that the worker has."""
        self.ahead = False
        """Whether they were moved on along the momentum."""
        self.given = False
        """Whether they are in the weights buffer: one that starts anew may have had them before."""
        self._uplink = connection.uplink if isinstance(connection, VirtualConnection) else None
        self.segment = Segment.create(2 * nbytes) if connection.local and self._uplink is None else None
        self.travels = self.segment is None and self._uplink is None
        if self._uplink is not None:
            both = torch.empty(0, dtype=torch.uint8)
        elif self.segment is None:
            both = torch.zeros(2 * nbytes, dtype=torch.uint8)
        else:
            # By way of NumPy, whose arrays keep the mapping: what is staged must outlive the place.
            both = torch.from_numpy(np.frombuffer(self.segment.view, dtype=np.uint8))
        self.gradients, self.weights = both[:nbytes], both[nbytes:]
        self.receiving = False
        """Whether gradients are on their way into their place at this moment."""
        self.flats: list[torch.Tensor] | None = None
        """The gradients as the shard cuts a message up, once it has."""
        self.options: tuple[Options, ...] | None = None
        """Those of its optimizer, which it sends when they have changed."""
        self.sizes: Mapping[int, int] | None = None
        """The plan of batch sizes that the worker was told last."""
        self._answer: tuple[Mapping[str, object], bool] | None = None
        self._send_queue: queue.SimpleQueue[tuple[Mapping[str, object], bool] | None] = queue.SimpleQueue()
        self._sender: threading.Thread | None = None

    def give(self, version: int, ahead: Sequence[float], read: Callable[[torch.Tensor], None]) -> bool:
        """The worker gets the weights of this version, so far ahead, which `read` writes into a message.

        False where its group's server has them already, so that no message of them travels.
        """
        self.version, self.ahead, self.given = version, any(ahead), True
        if self._uplink is None:
            read(self.weights)
            return True
        before = self._uplink.latest
        self.weights = self._uplink.weights((version, *ahead), read)
        return self.weights is not before

    def answer(self, header: Mapping[str, object], *, weights: bool) -> None:
        """Answer the request that the worker waits on; `weights`: with the message in the weights buffer."""
        self._answer = (header, weights)
        self.resend()

    def resend(self) -> bool:
        """Answer once more, where the request has been answered; False where it has not been."""
        if self._answer is None:
            return False
        if self.connection is None:
            return True
        if not self.travels:
            self._send(self._answer)
            return True
        # Over a network another thread sends the weights: the one that executes commands must not wait for a peer.
        if self._sender is None:
            self._sender = threading.Thread(target=self._send_all, name=f"evenstep-sender-{self.worker}", daemon=True)
            self._sender.start()
        self._send_queue.put(self._answer)
        return True

    def take_in(self, sequence: int, version: int | None = None) -> None:
        """A new request, by a worker that has these weights; what was answered before is of no use any more."""
        self.sequence = sequence
        if version is not None:
            self.version = version
        self._answer = None

    def close(self) -> None:
        """The worker will not use it any more; what is staged in it lives as long as it is viewed."""
        self._send_queue.put(None)
        if self.connection is not None:
            self.connection.close()
        self.connection = None
        if self.segment is not None:
            self.segment.close()
        # Remaining references to this slot then hold no memory; what is staged has its own view of it.
        self.gradients = self.weights = torch.empty(0, dtype=torch.uint8)
        self.flats = None

    def _send_all(self) -> None:
        while (answer := self._send_queue.get()) is not None:
            self._send(answer)

    def _send(self, answer: tuple[Mapping[str, object], bool]) -> None:
        header, weights = answer
        connection = self.connection
        if connection is None:
            return
        payload = [memory_of(self.weights)] if weights and self.segment is None else []
        try:
            connection.send(header, *payload, wait=self.travels)
        except ConnectionLostError:
            return  # The thread that receives from this connection notices it too and handles it.


def refused(slot: WorkerSlot | None, fields: Fields, error: Exception) -> Header | None:
    """Refuse a request; the refusal to send where it is not kept in the slot, as other answers are.

    A refusal may get lost on its way as they do, and then the request comes again.
    """
    try:
        sequence = fields.whole("seq", least=1)
    except ProtocolError:
        sequence = 0
    refusal = {"error": str(error) or repr(error), "kind": type(error).__name__, "answer": sequence}
    if slot is None or not sequence or sequence < slot.sequence:
        return refusal
    slot.take_in(sequence)
    slot.answer(refusal, weights=False)
    return None
