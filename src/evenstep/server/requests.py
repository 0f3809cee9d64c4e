"""The requests of a worker during a run, and what all connections of a server share."""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import final

import numpy as np

from evenstep.core.coordinate import Arrival
from evenstep.core.errors import ProtocolError
from evenstep.core.samples.pass_costs import PassCosts
from evenstep.protocol import messages
from evenstep.protocol.encoding import encode
from evenstep.protocol.optimizer import Options
from evenstep.protocol.run_spec import MAX_BYTES
from evenstep.server.primary import Primary
from evenstep.server.rendezvous import Rendezvous
from evenstep.server.shard_state import ShardState
from evenstep.server.worker_slot import WorkerSlot
from evenstep.telemetry import Recorder, Silent
from evenstep.tensors.messages import memory_of
from evenstep.transport.base import Connection, ConnectionLostError, Message


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What all connections of a server share.

    Attributes:
        shard_state: This shard.
        primary: On shard 0, what decides; None on the other shards.
        rendezvous: Where workers meet before the run begins; used on shard 0.
        lock: Held for every call of these three; reentrant.
        workers: Number of workers of the run.
        heartbeat_seconds: How long a worker may be silent.
        recorder: Receives the events of the other shards.
        abort: Ends a broken server, so that the launcher goes back to a snapshot.
    """

    shard_state: ShardState
    primary: Primary | None
    rendezvous: Rendezvous
    lock: AbstractContextManager[bool]
    workers: int
    heartbeat_seconds: float
    recorder: Recorder = field(default_factory=Silent)
    abort: Callable[[], None] = lambda: os._exit(1)

    @property
    def deciding(self) -> Primary:
        """The primary; ProtocolError on other shards than shard 0."""
        if self.primary is None:
            raise ProtocolError("this server only holds parameters: ask shard 0")
        return self.primary


@final
class Requests:
    """The requests of a worker. `slot`: its place at this server, once it has one."""

    def __init__(self, connection: Connection, service: Service) -> None:
        self.slot: WorkerSlot | None = None
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
        """The worker made a request. Called after it was carried out, so that delays of the server do not count."""
        if self.slot is not None and self._primary is not None:
            with self._lock:
                self._primary.asked(self.slot.worker)

    def place(self) -> WorkerSlot:
        """The slot of the worker; ProtocolError if it has none (any more)."""
        slot = self.slot
        if slot is None or self._shard_state.slots.get(slot.worker) is not slot:
            raise ProtocolError("the worker has not joined here, or was given up: join again")
        return slot

    def _still_new(self, sequence: int) -> bool:
        """Whether the worker still has its slot, uses this connection, and has not sent this request before."""
        slot = self.place()
        return slot.connection is self._connection and slot.is_new(sequence)

    def request(self, request: messages.Request, message: Message) -> None:
        """Have the primary carry out a request."""
        body = request.body
        if isinstance(body, messages.Push):
            self._push(request, body, message)
        elif isinstance(body, messages.Initialise):
            self._initialise(request, message)
        elif isinstance(body, messages.Begin):
            self._begin(request, body, message)
        else:
            with self._lock:
                slot = self.place()
                if not slot.is_new(request.sequence):
                    return
                slot.take_in(request.sequence, request.has)
                primary = self._service.deciding
                if isinstance(body, messages.More):
                    primary.more(slot.worker, body.ahead)
                elif isinstance(body, messages.Rest):
                    primary.rest(slot.worker, body.done, ended=body.ended)
                else:
                    primary.stop(slot.worker)

    def _receive_gradients(self, slot: WorkerSlot, message: Message, *, empty: bool = False) -> None:
        """Receive gradients or initial weights."""
        self._receive(slot, message, memory_of(slot.gradients[: 0 if empty or not slot.travels else None]))

    def _receive(self, slot: WorkerSlot, message: Message, buffer: memoryview) -> None:
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

    def _begin(self, request: messages.Request, begin: messages.Begin, message: Message) -> None:
        slot, sequence = self.place(), request.sequence
        if not slot.is_new(sequence):
            return
        spec = self._shard_state.spec
        assert spec is not None
        costs = None if begin.mean is None else self._receive_costs(slot, message, spec.length, begin.mean)
        with self._lock:
            if self._still_new(sequence):
                slot.take_in(sequence, request.has)
                self._service.deciding.begin(slot.worker, begin.number, begin.epoch, begin.ahead, costs)

    def _receive_costs(self, slot: WorkerSlot, message: Message, length: int, mean: int) -> PassCosts:
        if length * messages.COST_BYTES > MAX_BYTES:
            raise ProtocolError(f"the costs of {length} positions do not fit into a message")
        units = np.empty(length, dtype="<u4")
        self._receive(slot, message, units.view(np.uint8).data)
        if not 1 <= int(units.min()) <= int(units.max()) <= messages.MAX_COST:
            raise ProtocolError(f"positions cost {int(units.min())} to {int(units.max())}, and 1 to 2^31 is possible")
        return PassCosts.of(units, mean)

    def _initialise(self, request: messages.Request, message: Message) -> None:
        slot, sequence = self.place(), request.sequence
        if not slot.is_new(sequence):
            return
        self._receive_gradients(slot, message)
        with self._lock:
            if not self._still_new(sequence):
                return
            slot.take_in(sequence)
            self._service.deciding.initialised(slot.worker)
            slot.answer(
                encode(messages.Answer(sequence=sequence, weights=False, version=self._shard_state.version)),
                weights=False,
            )

    def _push(self, request: messages.Request, push: messages.Push, message: Message) -> None:
        slot, sequence = self.place(), request.sequence
        if not slot.is_new(sequence):
            return
        arrival = Arrival(
            key=(slot.worker, slot.incarnation, sequence),
            claim=push.claim,
            version=push.weights,
            samples=push.samples,
            units=push.units,
            row=push.row,
        )
        options = self._options_of(slot, push)
        self._receive_gradients(slot, message, empty=not push.samples)
        with self._lock:
            if not self._still_new(sequence):
                return
            slot.take_in(sequence, request.has)
            self._shard_state.stage(arrival.key)
            slot.keeps = True
            try:
                self._service.deciding.push(arrival, options, push.norm)
            except ProtocolError:
                self._shard_state.discard(arrival.key)
                raise
            finally:
                kept = slot.take_kept()
        if kept is not None:
            slot.send(kept)

    def _options_of(self, slot: WorkerSlot, push: messages.Push) -> Sequence[Options]:
        if push.options is not None:
            self._shard_state.check_options(push.options)
            slot.options = push.options
        if slot.options is None:
            raise ProtocolError("a worker's first push has no options")
        return slot.options

    def stage(self, stage: messages.Stage, message: Message) -> None:
        """On other shards than shard 0: stage gradients, without any decision."""
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
            self.reply(messages.Pending(sequence=sequence, events=self._primary.events))
