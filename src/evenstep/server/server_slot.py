"""A worker's place at a server: two message buffers and the current request. It outlives connections."""

import queue
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, final

import numpy as np
import torch

from evenstep.protocol.encoding import encode, sequence_of
from evenstep.protocol.messages import Refusal
from evenstep.server.uplink import VirtualConnection
from evenstep.tensors.messages import memory_of, zeros
from evenstep.tensors.narrow import NarrowMessages
from evenstep.transport.base import Connection, ConnectionLostError
from evenstep.transport.codec import close_files
from evenstep.transport.segment import create_segment

if TYPE_CHECKING:
    from evenstep.server.shard.shard import MessageViews


@final
class ServerSlot:
    """The buffers and the current request of one incarnation of a worker.

    On one host both buffers are one shared segment. Otherwise they are private, and their bytes travel with the
    messages. A worker behind a group server has no buffers here and uses the group's.

    Attributes:
        gradients, weights: A message each, uint8.
        files: The open file of the shared segment, to pass to the worker; empty if there is none.
        travels: Whether gradients come as the payload of a push, not in shared memory.
        sequence: The sequence of the latest request.
        connection: The connection to the worker; None while there is none.
        version: The version of the worker's weights, as its latest request says.
        narrow: The format of messages on a narrow wire; None: messages are as they are in the buffers.
        receiving: Whether gradients are arriving now.
        views: Views of the gradients; None before the first push.
        sizes: The batch sizes that the worker was last sent.
    """

    def __init__(
        self, worker: int, incarnation: int, nbytes: int, connection: Connection, narrow: NarrowMessages | None = None
    ) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self.connection: Connection | None = connection
        self.sequence = 0
        self.version = -1
        self.receiving = False
        self.narrow = narrow
        self.views: MessageViews | None = None
        self.sizes: Mapping[int, int] | None = None
        self._uplink = connection.uplink if isinstance(connection, VirtualConnection) else None
        self.files: tuple[int, ...] = ()
        self.travels = not connection.local
        if self._uplink is not None:
            both = torch.empty(0, dtype=torch.uint8)
        elif self.travels:
            both = zeros(2 * nbytes)
        else:
            descriptor, mapping = create_segment(2 * nbytes)
            self.files = (descriptor,)
            # Through NumPy, whose arrays keep the mapping alive: staged gradients must outlive the slot.
            both = torch.from_numpy(np.frombuffer(mapping, dtype=np.uint8))
        self.gradients, self.weights = both[:nbytes], both[nbytes:]
        self._own = self.weights
        self._difference: torch.Tensor | None = None
        """The change that the latest answer sends instead of the weights."""
        self._answer: tuple[bytes, bool] | None = None
        self._send_queue: queue.SimpleQueue[tuple[bytes, bool] | None] = queue.SimpleQueue()
        self._sender: threading.Thread | None = None

    def give(
        self,
        which: tuple[float, ...],
        read: Callable[[torch.Tensor], None],
        lies: torch.Tensor | None,
        *,
        rounds: bool,
    ) -> bool:
        """Prepare weights for the worker; `read` writes them into a message. `which`: their version and look-ahead.

        Where they travel, they are sent from the message `lies`, if there is one, which must not change meanwhile.
        If it `rounds`, on a narrow wire, the difference from the weights that the worker has travels. They then move by
        what travels, so that the next difference has what rounding has left out.

        Returns:
            True if a message of weights travels. It does not if the worker's group server has them already.
        """
        self._difference = None
        if self.narrow is not None and rounds:
            goal = torch.empty_like(self.weights)
            read(goal)
            self._difference = self.narrow.approach(self.weights, goal)
            return True
        if self._uplink is not None:
            self.weights, new = self._uplink.weights(which, read)
            return new
        self.weights = self._own if lies is None or self.narrow is not None or not self.travels else lies
        if self.weights is self._own:
            read(self.weights)
        return True

    def changed_sizes(self, sizes: Mapping[int, int], workers: int) -> tuple[int, ...] | None:
        """Return the batch sizes of all workers; None if the worker was last sent the same."""
        if self.sizes is sizes:
            return None
        self.sizes = sizes
        return tuple(sizes.get(each, 0) for each in range(workers))

    def answer(self, header: bytes, *, weights: bool) -> None:
        """Answer the worker's request. `weights`: with the message in the weights buffer."""
        self._answer = (header, weights)
        self.resend()

    def refuse(self, sequence: int, error: Exception) -> None:
        """Answer with an error."""
        self.answer(encode(_refusal(sequence, error)), weights=False)

    def resend(self) -> bool:
        """Repeat the answer; False if there is none yet."""
        if self._answer is None:
            return False
        if self.connection is None:
            return True
        if not self.travels:
            self._send(self._answer)
            return True
        # Over a network the thread that holds the lock must not wait for a peer.
        if self._sender is None:
            self._sender = threading.Thread(target=self._send_all, name=f"evenstep-sender-{self.worker}", daemon=True)
            self._sender.start()
        self._send_queue.put(self._answer)
        return True

    def is_new(self, sequence: int) -> bool:
        """True if this request is new. If it was answered before, repeat the answer."""
        if sequence == self.sequence:
            self.resend()
        return sequence > self.sequence

    def take_in(self, sequence: int, version: int | None = None) -> None:
        """Accept a new request and drop the former answer. `version`: the version of the worker's weights."""
        self.sequence = sequence
        if version is not None:
            self.version = version
        self._answer = None

    def close(self) -> None:
        """Free the slot. Staged gradients live as long as they are viewed."""
        self._send_queue.put(None)
        if self.connection is not None:
            self.connection.close()
        self.connection = None
        files, self.files = self.files, ()
        close_files(files)
        # Remaining references to this slot then hold no memory.
        self.gradients = self.weights = self._own = torch.empty(0, dtype=torch.uint8)
        self.views = self._difference = None

    def _send_all(self) -> None:
        while (answer := self._send_queue.get()) is not None:
            self._send(answer)

    def _send(self, answer: tuple[bytes, bool]) -> None:
        """Send an answer; over a network this may wait for the worker."""
        header, weights = answer
        connection = self.connection
        if connection is None:
            return
        try:
            connection.send(header, *(self._payload() if weights else []), wait=self.travels)
        except ConnectionLostError:
            return  # The thread that receives from this connection handles it.

    def _payload(self) -> list[memoryview]:
        if self._uplink is not None:
            return self._uplink.unsent_weights()
        return [memory_of(self.weights if self._difference is None else self._difference)] if self.travels else []


def refused(slot: ServerSlot | None, header: bytes, error: Exception) -> bytes | None:
    """Refuse a request. Returns the refusal if the caller has to send it.

    If the worker has a slot, the slot sends the refusal and keeps it, since it may have to be repeated.
    """
    sequence = sequence_of(header)
    if slot is None or not sequence or sequence < slot.sequence:
        return encode(_refusal(sequence, error))
    slot.take_in(sequence)
    slot.refuse(sequence, error)
    return None


def _refusal(sequence: int, error: Exception) -> Refusal:
    return Refusal(sequence=sequence, error=str(error) or repr(error), kind=type(error).__name__)
