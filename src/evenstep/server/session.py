"""One connection to a server: reads what comes, checks it, and has the primary or the shard state do it.

Requests have a number, `seq`, that counts up within an incarnation; one that comes again is not taken in again, but
answered again. What is malformed ends the connection; what is not possible now is answered with an error.
"""

import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Final, final

from evenstep.core.activity import Doing, Seen
from evenstep.core.coordinate import Arrival, PushKey
from evenstep.core.errors import EvenstepError, ProtocolError
from evenstep.core.supervision import Why
from evenstep.core.values import Reports
from evenstep.protocol.fields import Fields
from evenstep.protocol.optimizer import Options, options_from_record
from evenstep.protocol.run_spec import MAX_BYTES
from evenstep.server.group.uplink import Uplink
from evenstep.server.primary import BrokenServerError, Primary
from evenstep.server.rendezvous import MAX_ROUNDS, Rendezvous
from evenstep.server.shard_state import ShardState
from evenstep.server.worker_slot import WorkerSlot, refused
from evenstep.telemetry import Recorder, Silent
from evenstep.telemetry.say import say
from evenstep.tensors.memory import memory_of
from evenstep.tensors.states import decode_states, encode_states
from evenstep.transport.base import Connection, ConnectionLostError, Header, Message

_LARGEST: Final = 2**31
MAX_NAMED: Final = 16
"""The most workers that are named of those who have not come."""
_ROW_LENGTH: Final = Reports.columns()
MAX_STATES: Final = 8
"""The most tensors of a parameter's size that an optimizer keeps for it."""


@final
class Session:
    """Serves one connection until it ends; `serve` runs in a thread of its own.

    Args:
        connection: To a worker or, on the other shards, to shard 0.
        shard_state: This shard.
        primary: What decides; None on the other shards.
        rendezvous: Where workers agree before the run begins; used on shard 0.
        lock: Held for every call of the other three; whoever holds it may take it again.
        workers: How many workers the run has.
        heartbeat_seconds: What workers are told of it.
        recorder: Takes the events of the other shards.
        abort: Ends a server that is of no use any more, so that whoever started it goes back to a snapshot.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        shard_state: ShardState,
        primary: Primary | None,
        rendezvous: Rendezvous,
        lock: AbstractContextManager[bool],
        workers: int,
        heartbeat_seconds: float,
        recorder: Recorder | None = None,
        abort: Callable[[], None] = lambda: os._exit(1),
    ) -> None:
        self._connection = connection
        self._shard_state = shard_state
        self._primary = primary
        self._rendezvous = rendezvous
        self._lock = lock
        self._workers = workers
        self._heartbeat_seconds = heartbeat_seconds
        self._recorder = recorder or Silent()
        self._failing = False
        """Whether the last snapshot could not be written; on the other shards."""
        self._abort = abort
        self._slot: WorkerSlot | None = None
        self._follows = False
        self._uplink: Uplink | None = None
        """Where this connection is to a group server."""
        self._requests: dict[str, Callable[[Fields, Message], None]] = {
            "ping": self._ping,
            "meet": self._meet,
            "absent": self._absent,
            "start": self._start,
            "initialise": self._initialise,
            "begin": self._begin,
            "push": self._push,
            "stage": self._stage,
            "rest": self._rest,
            "again": self._again,
            "stop": self._stop,
            "goodbye": self._goodbye,
            "hung": self._hung,
            "drain": self._drain,
            "follow": self._follow,
            "group": self._group,
            "states": self._states,
            "load_states": self._load_states,
        }
        self._commands: dict[str, Callable[[Fields], None]] = {
            "answer": self._follow_answer,
            "commit": self._follow_commit,
            "discard": lambda fields: shard_state.discard(_key(fields.wholes("key", 3))),
            "leave": self._follow_leave,
            "initialise": lambda fields: shard_state.initialise(fields.whole("worker"), fields.whole("version")),
            "restore": self._follow_restore,
            "snapshot": lambda _: self._follow_snapshot(meanwhile=False),
            "snapshot_meanwhile": lambda _: self._follow_snapshot(meanwhile=True),
        }

    def serve(self) -> None:
        """Until the connection ends."""
        while self.serve_one():
            pass

    def serve_one(self) -> bool:
        """Wait for a message and do what it asks for; False where the connection has ended, and is done with."""
        try:
            message = self._connection.receive()
            try:
                self._request(Fields(message.header), message)
            except ConnectionLostError:
                raise
            except BrokenServerError:
                traceback.print_exc()
                self._abort()
                raise
            except Exception as error:
                # The worker must hear of it, whatever it is, instead of asking again for ever.
                if not isinstance(error, EvenstepError):
                    traceback.print_exc()
                self._refuse(Fields(message.header), error)
        except ConnectionLostError:
            self._connection.close()
            self._lost()
            return False
        return True

    def _refuse(self, fields: Fields, error: Exception) -> None:
        """Answer with the error."""
        with self._lock:
            refusal = refused(self._slot, fields, error)
        if refusal is not None:
            self._reply(refusal)

    def _reply(self, header: Header) -> None:
        """Send this; a peer on this host, whose thread serves all others here too, is not waited for."""
        self._connection.send(header, wait=not self._connection.local)

    def _request(self, fields: Fields, message: Message) -> None:
        if self._uplink is not None:
            self._uplink.take(fields, message)
            return
        operation = fields.text("op")
        if self._follows:
            try:
                with self._lock:
                    self._commands[operation](fields)
            except Exception as error:
                raise BrokenServerError("this server could not do what the first one told it") from error
            return
        if operation not in self._requests:
            raise ProtocolError(f"a message asked for {operation[:40]!r}, which no server does")
        try:
            self._requests[operation](fields, message)
        finally:
            if operation != "ping":
                self._hear()

    def _hear(self) -> None:
        """The worker asked for something: told after it was done, so that a busy server delays nothing received."""
        if self._slot is not None and self._primary is not None:
            with self._lock:
                self._primary.asked(self._slot.worker)

    def _lost(self) -> None:
        """The connection has ended: on one host the worker has too; elsewhere it may come back until it is silent."""
        if self._uplink is not None:
            self._uplink.lost()
        with self._lock:
            if self._follows:
                self._shard_state.led = False
            self._rendezvous.leave(self._connection)
            slot, self._slot = self._slot, None
            if slot is None or slot.connection is not self._connection:
                return
            slot.connection = None
            if self._primary is not None and self._connection.local:
                self._primary.lose(slot.worker, slot.incarnation, Why.ENDED)

    # Before a run.

    def _ping(self, fields: Fields, message: Message) -> None:
        """A worker's pulse; only a peer that always reads, such as a group server, asks for an echo."""
        if fields.has("echo"):
            self._reply({"pong": True})
        if self._slot is not None and self._primary is not None:
            with self._lock:
                self._primary.pulse(self._slot.worker, _seen(fields))

    def _meet(self, fields: Fields, message: Message) -> None:
        rank, sequence = fields.whole("rank", most=self._workers - 1), fields.whole("seq")
        number = fields.whole("round", most=MAX_ROUNDS - 1)
        record = self._text(message)
        # A worker that was told before is in the run already: an answer would come between those that it waits for.
        asked = None if fields.has("known") else sequence
        with self._lock:
            self._rendezvous.come(rank, record, self._connection, asked, number)
            if self._primary is not None:
                self._primary.met(rank)

    def _absent(self, fields: Fields, message: Message) -> None:
        """Somebody has waited for the others for long."""
        with self._lock:
            absent = self._rendezvous.absent[:MAX_NAMED]
        self._reply({"absent": absent})

    def _text(self, message: Message) -> bytes:
        """The payload, where it is a text of a size that can be expected."""
        if message.payload_bytes > MAX_BYTES:
            raise ConnectionLostError(f"a description of {message.payload_bytes} bytes: it has at most {MAX_BYTES}")
        text = bytearray(message.payload_bytes)
        self._connection.receive_payload(memoryview(text))
        return bytes(text)

    def _start(self, fields: Fields, message: Message) -> None:
        """A worker takes its place; with an incarnation that is still known, the one it had."""
        worker, incarnation = fields.whole("rank", most=self._workers - 1), fields.whole("incarnation", least=-1)
        encoded = self._text(message)
        with self._lock:
            slot = self._shard_state.slots.get(worker)
            back = slot is not None and slot.incarnation == incarnation and slot.segment is None
            if slot is not None and back and not self._connection.local:
                # What still comes on the old line is of no use, and must not be taken in beside what comes on this one.
                old, slot.connection = slot.connection, self._connection
                if old is not None:
                    old.close()
            elif self._primary is not None:
                has, limit_seconds = fields.whole("has", least=-1), fields.number("timeout")
                incarnation = self._primary.start(worker, encoded, self._connection, has, limit_seconds)
                slot = self._shard_state.slots[worker]
            else:
                if slot is not None:
                    self._shard_state.leave(worker, slot.incarnation)
                self._shard_state.define(encoded, self._workers)
                slot = self._shard_state.slot(worker, incarnation, self._connection)
            self._slot = slot
            # Here, under the lock: nothing may be sent to the worker before it.
            self._connection.send(
                {
                    "answer": fields.whole("seq"),
                    "incarnation": incarnation,
                    "heartbeat": self._heartbeat_seconds,
                    "nbytes": self._shard_state.nbytes,
                    "version": self._shard_state.version,
                },
                files=[slot.segment.descriptor] if slot.segment is not None else [],
                wait=False,  # Nothing else is on its way yet.
            )

    # A run.

    def _place(self) -> WorkerSlot:
        """The worker's place.

        Raises:
            ProtocolError: It has none, or not any more.
        """
        slot = self._slot
        if slot is None or self._shard_state.slots.get(slot.worker) is not slot:
            raise ProtocolError("the worker has not started here, or was given up for dead: start anew")
        return slot

    def _is_new(self, slot: WorkerSlot, sequence: int) -> bool:
        """Whether this request has not been taken in before; if it was answered, it is once more."""
        if sequence > slot.sequence:
            return True
        if sequence == slot.sequence:
            slot.resend()
        return False

    def _receive_gradients(self, slot: WorkerSlot, message: Message, *, empty: bool = False) -> None:
        """Have the gradients, or initial weights, whole in their place."""
        expected = 0 if empty or not slot.travels else self._shard_state.nbytes
        if message.payload_bytes != expected:
            raise ConnectionLostError(f"a payload of {message.payload_bytes} bytes where {expected} were due")
        if expected:
            slot.receiving = True
            try:
                self._connection.receive_payload(memory_of(slot.gradients))
                self._hear()
            finally:
                slot.receiving = False

    def _still_new(self, sequence: int) -> bool:
        """Once the lock is held: whether the place is the worker's, reached on this line, and the request new."""
        slot = self._place()
        return slot.connection is self._connection and self._is_new(slot, sequence)

    def _head_of(self) -> Primary:
        if self._primary is None:
            raise ProtocolError("this server holds parameters and decides nothing: ask the first one")
        return self._primary

    def _initialise(self, fields: Fields, message: Message) -> None:
        slot, sequence = self._place(), _sequence(fields)
        if not self._is_new(slot, sequence):
            return
        self._receive_gradients(slot, message)
        with self._lock:
            if not self._still_new(sequence):
                return
            slot.take_in(sequence)
            if self._primary is not None:
                self._primary.initialised(slot.worker)
            slot.answer({"answer": slot.sequence}, weights=False)

    def _begin(self, fields: Fields, message: Message) -> None:
        number, epoch, ahead = fields.whole("number"), fields.whole("epoch"), fields.whole("ahead", most=1)
        with self._lock:
            slot = self._place()
            if self._take_in(slot, fields):
                self._head_of().begin(slot.worker, number, epoch, ahead)

    def _push(self, fields: Fields, message: Message) -> None:
        slot, sequence = self._place(), _sequence(fields)
        if not self._is_new(slot, sequence):
            return
        arrival = Arrival(
            key=(slot.worker, slot.incarnation, sequence),
            claim=fields.whole("claim"),
            version=fields.whole("weights"),
            samples=fields.whole("samples", most=_LARGEST),
            units=fields.whole("units"),
            row=tuple(fields.wholes("row", _ROW_LENGTH)),
        )
        norm, has = fields.number("norm"), _has(fields)
        options = self._options_of(slot, fields)
        self._receive_gradients(slot, message, empty=not arrival.samples)
        with self._lock:
            if not self._still_new(sequence):
                return
            slot.take_in(sequence, has)
            self._shard_state.stage(arrival.key)
            try:
                self._head_of().push(arrival, options, norm)
            except ProtocolError:
                self._shard_state.discard(arrival.key)
                raise

    def _options_of(self, slot: WorkerSlot, fields: Fields) -> tuple[Options, ...]:
        """The optimizer's options, which are sent when they have changed."""
        if fields.has("options"):
            options = options_from_record(fields.items("options"))
            self._shard_state.check_options(options)
            slot.options = options
        if slot.options is None:
            raise ProtocolError("a worker's first push had no options")
        return slot.options

    def _take_in(self, slot: WorkerSlot, fields: Fields) -> bool:
        """Take in a request without gradients; False where that was done before."""
        sequence, has = _sequence(fields), _has(fields)
        if not self._is_new(slot, sequence):
            return False
        slot.take_in(sequence, has)
        return True

    def _stage(self, fields: Fields, message: Message) -> None:
        """On the other shards: the gradients are here, and nothing is decided."""
        slot, sequence = self._place(), _sequence(fields)
        if sequence > slot.sequence:
            self._receive_gradients(slot, message)
            with self._lock:
                if self._still_new(sequence):
                    slot.take_in(sequence)
                    self._shard_state.stage((slot.worker, slot.incarnation, sequence))
        self._reply({"staged": sequence})
        with self._lock:
            if sequence == slot.sequence:
                slot.resend()  # Where it came again, it may have been answered.

    def _again(self, fields: Fields, message: Message) -> None:
        """The worker misses an answer: give it once more, ask for a request that never came, or say that it waits."""
        slot, sequence = self._place(), fields.whole("seq")
        if sequence > slot.sequence:
            self._reply({"resend": sequence})
            return
        if self._primary is None:
            self._reply({"staged": sequence})
        with self._lock:
            waits = sequence == slot.sequence and not slot.resend()
        if waits and self._primary is not None:
            self._reply({"pending": sequence, "events": self._primary.events})

    def _rest(self, fields: Fields, message: Message) -> None:
        with self._lock:
            slot = self._place()
            if self._take_in(slot, fields):
                self._head_of().rest(slot.worker)

    def _stop(self, fields: Fields, message: Message) -> None:
        with self._lock:
            slot = self._place()
            if self._take_in(slot, fields):
                self._head_of().stop(slot.worker)

    def _goodbye(self, fields: Fields, message: Message) -> None:
        """The worker is done."""
        if self._primary is None:
            return  # Shard 0 tells.
        with self._lock:
            slot = self._place()
            self._slot = None
            self._primary.lose(slot.worker, slot.incarnation, Why.DONE)

    def _hung(self, fields: Fields, message: Message) -> None:
        """The worker's group server has given it up, since it kept the others of its group waiting."""
        with self._lock:
            slot = self._place()
            self._slot = None
            self._head_of().lose(slot.worker, slot.incarnation, Why.HUNG, fields.number("seconds"))

    def _drain(self, fields: Fields, message: Message) -> None:
        """Whoever started the servers wants to know when the workers are done with them."""
        with self._lock:
            self._head_of().tell_when_empty(self._connection)

    def _states(self, fields: Fields, message: Message) -> None:
        """The optimizer's state, for a checkpoint of the script's."""
        self._place()
        with self._lock:
            pieces = encode_states(self._shard_state.shard.optimizer_state())

        def send() -> None:
            # Many bytes: whoever serves the others must not wait for them to be taken in.
            with suppress(ConnectionLostError):
                self._connection.send({"states": True}, *pieces)

        threading.Thread(target=send, name="evenstep-states", daemon=True).start()

    def _load_states(self, fields: Fields, message: Message) -> None:
        """The optimizer goes on from a checkpoint of the script's."""
        self._place()
        if message.payload_bytes > MAX_BYTES + MAX_STATES * self._shard_state.nbytes:
            raise ConnectionLostError(f"an optimizer state of {message.payload_bytes} bytes is more than there can be")
        payload = bytearray(message.payload_bytes)
        self._connection.receive_payload(memoryview(payload))
        states = decode_states(payload)
        with self._lock:
            self._shard_state.shard.load_optimizer_state(states)
        self._reply({"loaded": True})

    # The workers behind a group server.

    def _group(self, fields: Fields, message: Message) -> None:
        """This connection is a group server's, which speaks for its workers from now on."""
        self._head_of()
        if self._shard_state.count > 1 or self._slot is not None:
            raise ProtocolError("a group server has one server as its parent, and a connection of its own there")
        self._uplink = Uplink(
            self._connection,
            shard_state=self._shard_state,
            lock=self._lock,
            open_session=self._behind,
            receiving=self._receiving,
        )

    def _behind(self, line: Connection) -> "Session":
        return Session(
            line,
            shard_state=self._shard_state,
            primary=self._primary,
            rendezvous=self._rendezvous,
            lock=self._lock,
            workers=self._workers,
            heartbeat_seconds=self._heartbeat_seconds,
            abort=self._abort,
        )

    def _receiving(self, lines: Sequence[Connection], going_on: bool) -> None:
        """Whether much is on its way from the workers over these lines, whose pulse comes behind it."""
        with self._lock:
            for slot in self._shard_state.slots.values():
                if slot.connection in lines:
                    slot.receiving = going_on
                    self._head_of().heard(slot.worker)

    # The commands of shard 0, on the others.

    def _follow(self, fields: Fields, message: Message) -> None:
        """This connection is shard 0's: do what it says, in its order."""
        if self._primary is not None or self._shard_state.led:
            raise ProtocolError("a server is told what to do by the first server alone, on one connection")
        self._follows = self._shard_state.led = True

    def _follow_answer(self, fields: Fields) -> None:
        worker, sequence = fields.whole("worker"), fields.whole("answer")
        slot = self._shard_state.slots.get(worker)
        if slot is None or slot.incarnation != fields.whole("incarnation"):
            return  # The worker has started anew meanwhile, here first.
        if sequence > slot.sequence:
            slot.take_in(sequence)  # A request without gradients came to shard 0 alone.
        slot.version = _has(fields)  # As did what the worker says it has.
        self._shard_state.answer(worker, {"answer": sequence}, fields.numbers("ahead"))

    def _follow_commit(self, fields: Fields) -> None:
        pushes = [(_key(key), weight) for key, weight in fields.pairs("pushes")]
        options = options_from_record(fields.items("options"))
        self._shard_state.commit(pushes, options, fields.numbers("factors"), fields.numbers("compensation"))

    def _follow_restore(self, fields: Fields) -> None:
        self._shard_state.restore(fields.whole("version"), self._workers)

    def _follow_leave(self, fields: Fields) -> None:
        announced = [_key(key) for key in fields.lists("announced")]
        self._shard_state.leave(fields.whole("worker"), fields.whole("incarnation"), announced)

    def _follow_snapshot(self, *, meanwhile: bool) -> None:
        version = self._shard_state.version

        def told(failure: str | None) -> None:
            if failure is not None and not self._failing:
                say(f"server {self._shard_state.index} can write no snapshot: {failure}")
                self._recorder.record(
                    {"event": "snapshot_failed", "at": time.monotonic(), "version": version, "text": failure}
                )
            self._failing = failure is not None

        self._shard_state.snapshot(told, meanwhile=meanwhile)


def _seen(fields: Fields) -> Seen:
    """What a worker's main thread does."""
    try:
        doing = Doing(fields.text("doing"))
    except ValueError as error:
        raise ProtocolError("a worker's pulse told of something that no worker does") from error
    return Seen(doing=doing, iteration=fields.whole("iteration", least=-1), seconds=fields.number("seconds"))


def _sequence(fields: Fields) -> int:
    return fields.whole("seq", least=1)


def _has(fields: Fields) -> int:
    """The version of the weights that the worker says it has; -1 makes sure that it is sent the weights."""
    return fields.whole("has", least=-1)


def _key(values: list[int]) -> PushKey:
    worker, incarnation, sequence = values
    return worker, incarnation, sequence
