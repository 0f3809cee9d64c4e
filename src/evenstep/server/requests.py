"""The requests of a worker during a run, and the state that all connections of a server share."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import final

import numpy as np
import torch

from evenstep.core.errors import ConfigError, ProtocolError
from evenstep.core.samples.pass_costs import PassCosts
from evenstep.protocol import messages
from evenstep.protocol.encoding import encode
from evenstep.protocol.run_spec import MAX_BYTES
from evenstep.server.primary import Primary
from evenstep.server.rendezvous import Rendezvous
from evenstep.server.server_slot import ServerSlot
from evenstep.server.shard_state import ShardState
from evenstep.telemetry import Recorder, Silent
from evenstep.tensors.messages import memory_of
from evenstep.transport.base import Connection, ConnectionLostError, Message


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The state that all connections of a server share.

    Attributes:
        shard_state: This shard.
        primary: On shard 0, the primary; None on the other shards.
        rendezvous: Where workers meet before the run begins; used on shard 0.
        lock: Held for every call of these three; reentrant.
        recorder: Receives the events of the other shards.
        abort: Ends a broken server, so that the launcher goes back to a snapshot.
    """

    shard_state: ShardState
    primary: Primary | None
    rendezvous: Rendezvous
    lock: AbstractContextManager[bool]
    recorder: Recorder = field(default_factory=Silent)
    abort: Callable[[], None] = lambda: os._exit(1)

    @property
    def deciding(self) -> Primary:
        """The primary; ProtocolError on shards other than shard 0."""
        if self.primary is None:
            raise ProtocolError("this server only holds parameters: ask shard 0")
        return self.primary


@final
class WorkerRequests:
    """The requests of a worker. `slot`: its place at this server, once it has one."""

    def __init__(self, connection: Connection, service: Service) -> None:
        self.slot: ServerSlot | None = None
        self._connection = connection
        self._service = service
        self._shard_state = service.shard_state
        self._primary = service.primary
        self._lock = service.lock

    def reply(self, answer: messages.Answered) -> None:
        """Send an answer that is not repeated."""
        self.send(encode(answer))

    def send(self, header: bytes) -> None:
        """Send a message. On one host this does not wait, since one thread serves all workers of the host."""
        self._connection.send(header, wait=not self._connection.local)

    def hear(self) -> None:
        """Note a request of the worker. Called after it was carried out, so that delays of the server do not count."""
        if self.slot is not None and self._primary is not None:
            with self._lock:
                self._primary.asked(self.slot.worker)

    def place(self) -> ServerSlot:
        """Return the slot of the worker; ProtocolError if it has none, or none any more."""
        slot = self.slot
        if slot is None or self._shard_state.slots.get(slot.worker) is not slot:
            raise ProtocolError("the worker has not joined here, or was given up: join again")
        return slot

    def _still_new(self, sequence: int) -> bool:
        """True if the worker still has its slot, uses this connection, and has not sent this request before."""
        slot = self.place()
        return slot.connection is self._connection and slot.is_new(sequence)

    def request(self, request: messages.NumberedRequest, message: Message) -> None:
        """Have the primary carry out a request, once its payload has arrived."""
        slot, sequence, body = self.place(), request.sequence, request.body
        if not slot.is_new(sequence):
            return
        costs = None
        if isinstance(body, messages.PushGradients | messages.Initialise):
            self._receive_gradients(slot, message, empty=isinstance(body, messages.PushGradients) and not body.samples)
        elif isinstance(body, messages.Begin) and body.mean is not None:
            costs = self._receive_costs(slot, message, body.mean)
        with self._lock:
            if not self._still_new(sequence):
                return
            slot.take_in(sequence, request.has)
            self._carry_out(slot, body, costs)

    def _carry_out(self, slot: ServerSlot, body: messages.RequestBody, costs: PassCosts | None) -> None:
        primary, worker = self._service.deciding, slot.worker
        match body:
            case messages.PushGradients():
                self._push(slot, body)
            case messages.Begin():
                primary.begin(worker, body.number, body.epoch, body.ahead, costs)
            case messages.More():
                primary.more(worker, body.ahead)
            case messages.Rest():
                primary.rest(worker, body.done, ended=body.ended)
            case messages.Stop():
                primary.stop(worker)
            case messages.Initialise():
                primary.initialised(worker)
                self._shard_state.give(worker)

    def _push(self, slot: ServerSlot, push: messages.PushGradients) -> None:
        key = (slot.worker, slot.incarnation, slot.sequence)
        if push.samples:
            self._shard_state.stage(key)
        try:
            self._service.deciding.push(key, push)
        except (ConfigError, ProtocolError):
            self._shard_state.discard(key)
            raise

    def _receive_gradients(self, slot: ServerSlot, message: Message, *, empty: bool = False) -> None:
        """Receive gradients or initial weights, which come before the run has a version, and are never narrow."""
        narrow = slot.narrow if self._shard_state.version >= 0 else None
        if empty or not slot.travels or narrow is None:
            self._receive(slot, message, memory_of(slot.gradients[: 0 if empty or not slot.travels else None]))
        else:
            packed = torch.empty(narrow.nbytes, dtype=torch.uint8)
            self._receive(slot, message, memory_of(packed))
            narrow.write(packed, slot.gradients)

    def _receive_costs(self, slot: ServerSlot, message: Message, mean: int) -> PassCosts:
        spec = self._shard_state.spec
        assert spec is not None
        if spec.length * messages.COST_BYTES > MAX_BYTES:
            raise ProtocolError(f"the costs of {spec.length} positions do not fit into a message")
        units = np.empty(spec.length, dtype="<u4")
        self._receive(slot, message, units.view(np.uint8).data)
        if not 1 <= int(units.min()) <= int(units.max()) <= messages.MAX_COST:
            raise ProtocolError(f"positions cost {int(units.min())} to {int(units.max())}, and 1 to 2^31 is possible")
        return PassCosts.of(units, mean)

    def _receive(self, slot: ServerSlot, message: Message, buffer: memoryview) -> None:
        """Receive a payload of exactly the bytes of the buffer."""
        if message.payload_bytes != buffer.nbytes:
            raise ConnectionLostError(f"a payload of {message.payload_bytes} bytes, not of {buffer.nbytes}")
        if buffer.nbytes:
            slot.receiving = True
            try:
                self._connection.receive_payload(buffer)
                self.hear()
            finally:
                slot.receiving = False

    def stage(self, stage: messages.Stage, message: Message) -> None:
        """Stage gradients without any decision, on shards other than shard 0."""
        slot, sequence = self.place(), stage.sequence
        if sequence > slot.sequence:
            self._receive_gradients(slot, message)
            with self._lock:
                if self._still_new(sequence):
                    slot.take_in(sequence)
                    self._shard_state.stage((slot.worker, slot.incarnation, sequence))
        self.reply(messages.Staged(sequence=sequence))
        with self._lock:
            if sequence == slot.sequence:
                slot.resend()  # A repeated request may be answered already.

    def again(self, again: messages.Again, message: Message) -> None:
        """Repeat the answer, ask for a request that did not arrive, or tell the worker to wait."""
        slot, sequence = self.place(), again.sequence
        if sequence > slot.sequence:
            self.reply(messages.Resend(sequence=sequence))
            return
        if self._primary is None:
            self.reply(messages.Staged(sequence=sequence))
        with self._lock:
            waits = sequence == slot.sequence and not slot.resend()
        if waits and self._primary is not None:
            self.reply(messages.Pending(sequence=sequence, events=self._primary.progress))
