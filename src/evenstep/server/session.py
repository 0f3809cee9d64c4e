"""The session of one connection: passes each message to the primary or to the shard.

Requests are numbered within an incarnation. A repeated request is answered again, but not carried out again. An invalid
message, or a request that is not possible now, is answered with an error.
"""

import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, final

from evenstep.core.activity import Seen
from evenstep.core.errors import ProtocolError
from evenstep.core.supervision import Why
from evenstep.protocol import messages
from evenstep.protocol.encoding import decode, encode
from evenstep.protocol.run_spec import MAX_BYTES
from evenstep.server.follower import Follower
from evenstep.server.requests import Service, WorkerRequests
from evenstep.server.send_queue import SendQueue
from evenstep.server.server_slot import ServerSlot, refused
from evenstep.server.serving import BrokenServerError, serve_one
from evenstep.server.uplink import Uplink
from evenstep.tensors.states import decode_states, encode_states
from evenstep.transport.base import Connection, ConnectionLostError, Message

MAX_NAMED: Final = 16
"""The most absent workers to name."""
MAX_STATES: Final = 8
"""The most tensors of a parameter's size in that parameter's optimizer state."""


@final
class ServerSession:
    """Serves one connection."""

    def __init__(self, connection: Connection, service: Service) -> None:
        self._connection = connection
        self._service = service
        self._shard_state = service.shard_state
        self._primary = service.primary
        self._lock = service.lock
        self._requests = WorkerRequests(connection, service)
        self._role: Follower | Uplink | None = None
        """Set if the peer is shard 0 or a group server."""
        self._operations: Final[dict[type, Callable[[Any, Message], None]]] = {
            messages.NumberedRequest: self._requests.request,
            messages.Stage: self._requests.stage,
            messages.Again: self._requests.again,
            messages.Ping: self._ping,
            messages.Meet: self._meet,
            messages.Absent: self._absent,
            messages.Start: self._start,
            messages.Goodbye: self._goodbye,
            messages.States: self._states,
            messages.LoadStates: self._load_states,
            messages.Follow: self._follow,
            messages.ServeGroup: self._serve_group,
        }

    def serve_one(self) -> bool:
        return serve_one(self._connection, self._take, self._refuse, self._lost)

    def give_up(self, seconds: float) -> None:
        """Lose the worker, which kept the others of its group waiting for this many seconds."""
        with self._lock, suppress(ProtocolError):
            slot = self._requests.place()
            self._requests.slot = None
            self._service.deciding.lose(slot.worker, slot.incarnation, Why.HUNG, seconds)

    def _take(self, message: Message) -> None:
        try:
            if self._role is not None:
                self._role.take(message)
            else:
                self._ask(decode(messages.ASKED, message.header), message)
        except BrokenServerError:
            traceback.print_exc()
            self._service.abort()
            raise

    def _ask(self, asked: messages.Asked, message: Message) -> None:
        try:
            self._operations[type(asked)](asked, message)
        finally:
            if not isinstance(asked, messages.Ping):
                self._requests.hear()

    def _refuse(self, message: Message, error: Exception) -> None:
        with self._lock:
            refusal = refused(self._requests.slot, message.header, error)
        if refusal is not None:
            self._requests.send(refusal)

    def _lost(self) -> None:
        """Handle the end of the connection. A worker on this host has ended too; others may reconnect."""
        if self._role is not None:
            self._role.lost()
        with self._lock:
            self._service.rendezvous.leave(self._connection)
            slot, self._requests.slot = self._requests.slot, None
            if slot is None or slot.connection is not self._connection:
                return
            slot.connection = None
            if self._primary is not None and self._connection.local:
                self._primary.lose(slot.worker, slot.incarnation, Why.ENDED)

    # Before a run.

    def _ping(self, ping: messages.Ping, message: Message) -> None:
        # Only a peer that reads all the time, such as a group server, asks for an echo.
        if ping.echo:
            self._requests.reply(messages.Pong())
        if self._requests.slot is not None and self._primary is not None:
            seen = Seen(doing=ping.doing, iteration=ping.iteration, seconds=ping.seconds)
            with self._lock:
                self._primary.heard(self._requests.slot.worker, seen)

    def _meet(self, meet: messages.Meet, message: Message) -> None:
        self._check_rank(meet.rank)
        record = self._text(message)
        with self._lock:
            rendezvous, slot = self._service.rendezvous, self._shard_state.slots.get(meet.rank)
            rendezvous.require_single(meet.rank, meet.process, None if slot is None else slot.connection)
            rendezvous.come(meet, record, self._connection)
            if self._primary is not None:
                self._primary.met(meet.rank)

    def _check_rank(self, rank: int) -> None:
        if rank >= self._shard_state.settings.workers:
            raise ProtocolError(f"there is no worker {rank} in a run of {self._shard_state.settings.workers}")

    def _absent(self, asked: messages.Absent, message: Message) -> None:
        with self._lock:
            absent = self._service.rendezvous.absent[:MAX_NAMED]
        self._requests.reply(messages.Missing(ranks=tuple(absent)))

    def _text(self, message: Message) -> bytes:
        if message.payload_bytes > MAX_BYTES:
            raise ConnectionLostError(f"a description of {message.payload_bytes} bytes is longer than {MAX_BYTES}")
        text = bytearray(message.payload_bytes)
        self._connection.receive_payload(memoryview(text))
        return bytes(text)

    def _start(self, start: messages.Start, message: Message) -> None:
        """Give a worker a place: its former one, if its incarnation is still known."""
        self._check_rank(start.rank)
        encoded = self._text(message)
        with self._lock:
            slot = self._requests.slot = self._former(start) or self._new_place(start, encoded)
            placed = messages.Placed(
                incarnation=slot.incarnation,
                heartbeat=self._shard_state.settings.heartbeat_seconds,
                nbytes=self._shard_state.nbytes,
                version=self._shard_state.version,
            )
            # Under the lock, since this must be the first message to the worker.
            self._connection.send(encode(placed), files=slot.files, wait=False)

    def _former(self, start: messages.Start) -> ServerSlot | None:
        """Return the former slot of the worker, which uses this connection from now on."""
        slot = self._shard_state.slots.get(start.rank)
        known = slot is not None and slot.incarnation == start.incarnation and not slot.files
        if slot is None or not known or self._connection.local:
            return None
        # Messages that still arrive on the old connection must not be mixed with those of this one.
        old, slot.connection = slot.connection, self._connection
        if old is not None:
            old.close()
        return slot

    def _new_place(self, start: messages.Start, encoded: bytes) -> ServerSlot:
        if self._primary is not None:
            self._primary.start(start.rank, encoded, self._connection, start.has, start.timeout)
            return self._shard_state.slots[start.rank]
        slot = self._shard_state.slots.get(start.rank)
        if slot is not None:
            self._shard_state.leave(start.rank, slot.incarnation)
        self._shard_state.define(encoded)
        return self._shard_state.slot(start.rank, start.incarnation, self._connection)

    def _goodbye(self, asked: messages.Goodbye, message: Message) -> None:
        if self._primary is None:
            return  # Shard 0 tells the other shards.
        with self._lock:
            slot = self._requests.place()
            self._requests.slot = None
            self._primary.lose(slot.worker, slot.incarnation, Why.DONE)

    def _states(self, asked: messages.States, message: Message) -> None:
        self._requests.place()
        with self._lock:
            pieces = encode_states(self._shard_state.shard.optimizer_state())
        # The thread that serves the other workers must not wait until this worker has received everything.
        SendQueue(self._connection).send_last(messages.States(), *pieces)

    def _load_states(self, asked: messages.LoadStates, message: Message) -> None:
        self._requests.place()
        if message.payload_bytes > MAX_BYTES + MAX_STATES * self._shard_state.nbytes:
            raise ConnectionLostError(f"an optimizer state of {message.payload_bytes} bytes is too large for this run")
        payload = bytearray(message.payload_bytes)
        self._connection.receive_payload(memoryview(payload))
        states = decode_states(payload)
        with self._lock:
            self._shard_state.shard.load_optimizer_state(states)
        self._requests.reply(messages.Loaded())

    # Connections of servers.

    def _follow(self, asked: messages.Follow, message: Message) -> None:
        if self._primary is not None or self._shard_state.led:
            raise ProtocolError("a server takes commands from one connection only, that of shard 0")
        self._role = Follower(self._shard_state, self._lock, self._service.recorder)

    def _serve_group(self, asked: messages.ServeGroup, message: Message) -> None:
        if self._service.deciding.shard_state.settings.count > 1 or self._requests.slot is not None:
            raise ProtocolError("a group server needs exactly one server as its parent, and a separate connection")
        self._role = Uplink(
            self._connection,
            shard_state=self._shard_state,
            lock=self._lock,
            open_session=lambda line: ServerSession(line, self._service),
            receiving=self._receiving,
        )

    def _receiving(self, lines: Sequence[Connection], now: bool) -> None:
        """Note that gradients of the workers on these lines start or stop arriving. Their pulses are late meanwhile."""
        with self._lock:
            for slot in self._shard_state.slots.values():
                if slot.connection in lines:
                    slot.receiving = now
                    self._service.deciding.heard(slot.worker)
