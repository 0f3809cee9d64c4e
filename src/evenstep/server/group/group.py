"""A group server: stands between the workers of a group, on their own host, and the group's parent.

It decides nothing but which pushes travel as one (`core.server.bundle`): what its workers ask for goes to the parent as
it is, and so do the answers back. Gradients stop here until they are one; weights come once, and are copied for each.
Nothing that it holds is missed when it dies: its workers begin anew, with the server that is started in its place.
"""

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, final

import torch

from evenstep.core.coordinate import Bundle, CombinedPush, Patience
from evenstep.core.errors import EvenstepError, ProtocolError
from evenstep.protocol.fields import Fields
from evenstep.protocol.run_spec import MAX_BYTES, RunSpec
from evenstep.server.group.member import GroupMember
from evenstep.server.send_queue import SendQueue
from evenstep.server.session import MAX_STATES
from evenstep.server.shard.sums import combined
from evenstep.tensors.memory import memory_of
from evenstep.transport.base import Connection, ConnectionLostError, Header, Message, SilentError
from evenstep.transport.codec import DEFAULT_LIMITS, encode_header

if TYPE_CHECKING:
    from evenstep.protocol.layout import ShardLayout

_GIVES_BACK: Final = frozenset({"begin", "rest", "stop"})
"""Whoever asks for these holds no claim any more."""
_PASSED_ON: Final = _GIVES_BACK | {"ping", "meet", "absent", "start", "goodbye", "states", "load_states"}
"""What a worker may ask of the parent; what else the parent takes comes from the group server itself."""
_PATIENCES: Final = 2
"""So many times the parent's patience a worker may be away: to be given up for dead, and to find that out."""


@final
class Parent:
    """The connection to the parent, while there is one."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.send_queue = SendQueue(connection)
        self.weights = torch.empty(0, dtype=torch.uint8)
        """The message of weights that came last."""

    def receive_weights(self, message: Message) -> None:
        """Take in the message of weights that comes with this one; of the one before nothing is needed any more."""
        if message.payload_bytes != self.weights.numel():
            self.weights = torch.empty(message.payload_bytes, dtype=torch.uint8)
        self.connection.receive_payload(memory_of(self.weights))

    def send_together(self, members: Sequence[GroupMember], number: int, gradients: torch.Tensor) -> None:
        """Send the requests of these in one message with the gradients, or the weights, that come with them."""
        requests = [memoryview(member.request) for member in members]
        header = {"op": "together", "number": number, "lines": [member.line for member in members]}
        self.send_queue.send({**header, "lengths": list(map(len, requests))}, *requests, memory_of(gradients))


@final
class Group:
    """What the workers of a group have in common, one event at a time.

    The connection to the parent is made when a worker needs it. When it is lost every worker begins anew, as after its
    own line was lost: what had not arrived at the parent was never heard of, and its claims are given to others.

    Args:
        workers: Of the whole run.
        connect: Makes a connection to the parent.
        patience_seconds: How long the parent may be silent.
    """

    def __init__(self, *, workers: int, connect: Callable[[], Connection], patience_seconds: float) -> None:
        self._workers = workers
        self._connect = connect
        self._patience_seconds = patience_seconds
        self._lock = threading.RLock()
        self._opened = 0
        self._members: dict[int, GroupMember] = {}
        self._bundle = Bundle()
        self._parent: Parent | None = None
        self._layout: ShardLayout | None = None
        self._draining: list[Connection] = []
        self._away: dict[int, int] = {}
        """The processes of those who were sent away to begin anew and have not come back, by rank."""
        self._needed = 0.0
        """When somebody was here, or nobody away."""
        self._events = 0
        """What the workers have asked for and the parent has answered, counted, as `Primary` counts."""
        self._patience = Patience()

    @property
    def deserted(self) -> bool:
        """Whether no worker is here, or on its way back."""
        return not self._members and not self._away

    def look(self, now: float) -> None:
        """Time has passed: who has ended while away, or is so for long when all others have left, is not waited for."""
        with self._lock:
            for line in self._patience.exceeded(self._bundle.waited_for(), now):
                self._give_up(self._members[line])
            if self._members or not self._away:
                self._needed = now
            elif now - self._needed > _PATIENCES * self._patience_seconds:
                self._away.clear()
            self._away = {rank: process for rank, process in self._away.items() if _lives(process)}
            self._say_drained()

    def open(self, connection: Connection) -> GroupMember:
        """A session for this connection."""
        with self._lock:
            self._opened += 1
            return GroupMember(self, connection, self._opened)

    # What a worker asks for.

    def asked(self, member: GroupMember, fields: Fields, message: Message) -> None:
        operation = fields.text("op")
        if operation != "ping":
            self._events += 1
            self._patience.asked(member.line)
        if operation == "ping":
            if member.started:
                self._pass_on(member, fields, message)
        elif operation in ("push", "initialise"):
            self._put(member, fields, message)
        elif operation == "again":
            self._again(member, fields)
        elif operation == "drain":
            with self._lock:
                self._draining.append(member.connection)
                self._say_drained()
        elif operation in _PASSED_ON:
            self._pass_on(member, fields, message)
        else:
            raise ProtocolError(f"a message asked for {operation[:40]!r}, which no group server does")

    def _put(self, member: GroupMember, fields: Fields, message: Message) -> None:
        """Gradients, or the weights to begin with, come to their place, and from there to the parent."""
        slot, sequence = member.slot, fields.whole("seq", least=1)
        initial = fields.text("op") == "initialise"
        samples, units = (0, 0) if initial else (fields.whole("samples"), fields.whole("units"))
        if message.payload_bytes:
            if message.payload_bytes != slot.gradients.numel():
                raise ConnectionLostError(f"a payload of {message.payload_bytes} bytes is no gradient of this run")
            if sequence > slot.sequence:
                member.connection.receive_payload(memory_of(slot.gradients))
        with self._lock:
            if not member.is_new(sequence):
                return
            member.request = encode_header(message.header, DEFAULT_LIMITS)
            if not initial:
                self._bundle.push(member.line, samples, units)
                self._pass_on_what_is_due()
            elif self._parent is not None:
                self._parent.send_together([member], 0, slot.gradients)

    def _again(self, member: GroupMember, fields: Fields) -> None:
        """The worker misses an answer: give it once more, ask for a request that never came, or say that it waits."""
        with self._lock:
            slot, sequence = member.slot, fields.whole("seq")
            if sequence > slot.sequence:
                member.connection.send({"resend": sequence}, wait=False)
            elif sequence == slot.sequence and not slot.resend():
                member.connection.send({"pending": sequence, "events": self._events}, wait=False)

    def _pass_on(self, member: GroupMember, fields: Fields, message: Message) -> None:
        """Have the parent do it."""
        operation = fields.text("op")
        payload = self._payload_of(member.connection, message)
        with self._lock:
            if member.gone:
                raise ConnectionLostError("the worker was given up for dead")
            if operation in _GIVES_BACK:
                if not member.is_new(fields.whole("seq", least=1)):
                    return
                self._bundle.ask(member.line)
            if operation == "start":
                self._learn(bytes(payload))
                member.rank, member.process = fields.whole("rank"), fields.whole("process", least=1)
                self._patience.joined(member.line, fields.number("timeout"))
            member.done = member.done or operation == "goodbye"
            self._members[member.line] = member
            # A parent that has nothing to say shows by the echo that it lives.
            header = {**message.header, "line": member.line, **({"echo": True} if operation == "ping" else {})}
            try:
                self._reach_parent().send_queue.send(header, memoryview(payload))
            except ValueError as error:
                raise ProtocolError("a message was too long to be passed on") from error
            self._pass_on_what_is_due()

    def _learn(self, description: bytes) -> None:
        """What the run is; the parent checks that all say the same."""
        if self._layout is None:
            with suppress(EvenstepError):  # Of which the parent tells the worker.
                self._layout = RunSpec.decode(description, self._workers).layout.shards(1)[0]

    def lost(self, member: GroupMember) -> None:
        with self._lock:
            self._end(member, {})

    def _give_up(self, member: GroupMember) -> None:
        """The worker hangs, and keeps others of its group waiting."""
        self._expect([member])
        self._end(member, {"hung": self._patience.limit_seconds(member.line)})

    def _end(self, member: GroupMember, why: Header) -> None:
        if self._members.get(member.line) is member and self._parent is not None:
            self._parent.send_queue.send({"op": "end", "line": member.line, **why})
        self._forget(member)
        self._pass_on_what_is_due()

    def _forget(self, member: GroupMember) -> None:
        self._members.pop(member.line, None)
        self._patience.left(member.line)
        self._bundle.leave(member.line)
        member.leave()
        self._say_drained()

    def _expect(self, members: Iterable[GroupMember]) -> None:
        """These are about to be sent away, and come back unless they were done."""
        self._away |= {member.rank: member.process for member in members if member.started and not member.done}

    def _say_drained(self) -> None:
        if not self.deserted:
            return
        for connection in self._draining:
            with suppress(ConnectionLostError):
                connection.send({"empty": True}, wait=False)
        self._draining.clear()

    # To the parent.

    def _reach_parent(self) -> Parent:
        if self._parent is None:
            self._parent = parent = Parent(self._connect())
            parent.send_queue.send({"op": "group"})
            threading.Thread(target=self._hear, args=(parent,), name="evenstep-parent", daemon=True).start()
        return self._parent

    def _pass_on_what_is_due(self) -> None:
        parent, layout = self._parent, self._layout
        if parent is None or layout is None:
            return  # Nobody is here, or will not be in a moment.
        while (together := self._bundle.due()) is not None:
            self._send_together(parent, layout, together)

    def _send_together(self, parent: Parent, layout: "ShardLayout", together: CombinedPush) -> None:
        members = [self._members[line] for line, _ in together.weights]
        weights = [weight for _, weight in together.weights]
        counted = [(member.slot.gradients, weight) for member, weight in zip(members, weights, strict=True) if weight]
        if len(counted) > 1:
            gradients = combined(layout, counted)
        else:
            gradients = counted[0][0] if counted else torch.empty(0, dtype=torch.uint8)
        parent.send_together(members, together.number, gradients)

    # From the parent.

    def _hear(self, parent: Parent) -> None:
        """Until the connection to the parent ends."""
        try:
            while True:
                message = parent.connection.receive(self._patience_seconds)
                payload = bytearray()
                if message.header.get("weights") and message.payload_bytes:
                    parent.receive_weights(message)
                else:
                    payload = self._payload_of(parent.connection, message)
                with self._lock:
                    self._told(parent, message.header, payload)
        except (ConnectionLostError, SilentError):
            pass
        finally:
            parent.send_queue.close()
            parent.connection.close()
            with self._lock:
                if self._parent is parent:
                    self._parent = None
                    self._expect(self._members.values())
                    for member in list(self._members.values()):
                        self._forget(member)

    def _payload_of(self, connection: Connection, message: Message) -> bytearray:
        """What came with a message that is passed on as it is."""
        nbytes = 0 if self._layout is None else self._layout.nbytes
        if message.payload_bytes > MAX_BYTES + MAX_STATES * nbytes:
            raise ConnectionLostError(f"a payload of {message.payload_bytes} bytes is more than there can be")
        payload = bytearray(message.payload_bytes)
        connection.receive_payload(memoryview(payload))
        return payload

    def _told(self, parent: Parent, header: Header, payload: bytearray) -> None:
        fields = Fields(header)
        if "refused" in header:
            self._bundle.refuse(fields.whole("refused"))
            self._pass_on_what_is_due()
            return
        if "line" not in header:
            raise ConnectionLostError(f"the parent sends no more: {header.get('error')}")
        member = self._members.get(fields.whole("line"))
        if member is None or "pong" in header:
            return
        self._events += 1
        answer = {name: value for name, value in header.items() if name != "line"}
        try:
            self._answer(member, parent, answer, payload)
        except ConnectionLostError:
            self.lost(member)

    def _answer(self, member: GroupMember, parent: Parent, answer: Header, payload: bytearray) -> None:
        """Give the parent's answer to the worker."""
        fields = Fields(answer)
        if "ended" in answer:
            self._expect([member])
            self._forget(member)
            self._pass_on_what_is_due()
        elif "incarnation" in answer:
            slot = member.take_place(fields.whole("incarnation"), fields.whole("nbytes"))
            self._bundle.join(member.line)
            self._away.pop(member.rank, None)
            files = [slot.segment.descriptor] if slot.segment is not None else []
            member.connection.send(answer, files=files, wait=False)
        elif member.started and answer.get("answer") == member.slot.sequence:
            weights, claims = bool(answer.get("weights")), answer.get("claims")
            if weights:
                member.slot.weights.copy_(parent.weights)
            held = len(claims) if isinstance(claims, list) else 0
            self._bundle.answer(member.line, held, over=bool(answer.get("over")))
            member.slot.answer(answer, weights=weights)
        else:
            # An optimizer's state, say: nobody else must wait until the worker has taken it in.
            SendQueue(member.connection).send_last(answer, memoryview(payload))


def _lives(process: int) -> bool:
    """Whether there is such a process on this host, where the workers of a group with a server are."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # There is, and it is another user's.
    return True
