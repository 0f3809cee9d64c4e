"""A group server, which stands between the workers of a group, on their host, and the group's parent.

It passes requests and answers on unchanged, and decides only which pushes travel as one (`core.coordinate.bundle`).
Gradients are combined here. Weights arrive once per version and are copied for each worker. A group server holds no
state worth saving: when it dies, its workers join again through the server that replaces it.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, final

import torch
from msgspec import Raw
from msgspec.structs import replace

from evenstep.core.coordinate import Bundle, CombinedPush, Presence
from evenstep.core.errors import EvenstepError, ProtocolError
from evenstep.protocol import group_messages, messages
from evenstep.protocol.encoding import decode, encode
from evenstep.protocol.run_spec import MAX_BYTES, RunSpec
from evenstep.server.group.member import GroupMember
from evenstep.server.send_queue import SendQueue
from evenstep.server.session import MAX_STATES
from evenstep.server.shard.sums import combined
from evenstep.tensors.messages import memory_of, zeros
from evenstep.transport.base import Connection, ConnectionLostError, Message, SilentError

if TYPE_CHECKING:
    from evenstep.protocol.layout import ShardLayout

_PATIENCES: Final = 2
"""How long a worker may be away, in heartbeats of the parent: one until it is given up, one until it notices."""


@final
class Parent:
    """The connection to the parent. `weights`: the latest message of weights."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.send_queue = SendQueue(connection)
        self.weights = torch.empty(0, dtype=torch.uint8)

    def receive_weights(self, message: Message) -> None:
        """Receive the payload of this message as the latest weights."""
        if message.payload_bytes != self.weights.numel():
            self.weights = zeros(message.payload_bytes)
        self.connection.receive_payload(memory_of(self.weights))

    def send_together(self, members: Sequence[GroupMember], number: int, gradients: torch.Tensor) -> None:
        """Send the requests of these workers as one message, with one gradient (or the initial weights)."""
        requests = [memoryview(member.request) for member in members]
        lines, lengths = tuple(member.line for member in members), tuple(map(len, requests))
        self.send_queue.send(
            group_messages.Together(number=number, lines=lines, lengths=lengths), *requests, memory_of(gradients)
        )


@final
class ServedGroup:
    """The workers of a group, one event at a time.

    The connection to the parent is made when a worker needs it. When it is lost, every worker joins again, as if its
    own connection had been lost, and the parent gives its claims to others.

    Args:
        workers: Number of workers of the whole run.
        connect: Connects to the parent.
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
        self._away = set[int]()
        """Workers that have to join again and have not yet."""
        self._needed = 0.0
        """The last time at which a worker was here, or no worker was away."""
        self._events = 0
        """Counts requests and answers, as `Primary.progress` does."""
        self._presence = Presence()
        self._now = 0.0
        """The time of the last look."""

    @property
    def deserted(self) -> bool:
        """True if no worker is here or expected back."""
        return not self._members and not self._away

    def look(self, now: float) -> None:
        """Give up workers that hang or will not come back. Call it often."""
        with self._lock:
            self._now = now
            for lost in self._presence.look(now, self._bundle.waited_for()):
                member = self._members[lost.worker]
                self._expect([member])
                self._end(member, lost.seconds)
            if self._members or not self._away:
                self._needed = now
            elif now - self._needed > _PATIENCES * self._patience_seconds:
                self._away.clear()

    def open(self, connection: Connection) -> GroupMember:
        """Open a session over this connection."""
        with self._lock:
            self._opened += 1
            return GroupMember(self, connection, self._opened)

    # Requests of workers.

    def asked(self, member: GroupMember, asked: messages.Asked, message: Message) -> None:
        """Carry out a request, or pass it to the parent.

        Raises:
            ProtocolError, ConnectionLostError: The request is invalid, or not possible now.
        """
        if isinstance(asked, messages.Ping):
            if member.started:
                # The echo shows that a parent without an answer is alive.
                self._pass_on(member, replace(asked, echo=True), b"")
            return
        self._events += 1
        self._presence.asked(member.line, self._now)
        if isinstance(asked, messages.NumberedRequest):
            self._request(member, asked, message)
        elif isinstance(asked, messages.Again):
            self._again(member, asked.sequence)
        elif isinstance(asked, messages.Stage | messages.Follow | messages.ServeGroup):
            raise ProtocolError(f"a worker sent {type(asked).__name__}, which only servers send to each other")
        else:
            self._pass_on(member, asked, self._payload_of(member.connection, message))

    def _request(self, member: GroupMember, request: messages.NumberedRequest, message: Message) -> None:
        body = request.body
        if isinstance(body, messages.PushGradients | messages.Initialise):
            self._put(member, request, body, message)
            return
        costs = isinstance(body, messages.Begin) and body.mean is not None
        payload = self._payload_of(member.connection, message) if costs else bytearray()
        with self._lock:
            if member.is_new(request.sequence):
                self._bundle.ask(member.line)
                self._pass_on(member, request, payload)

    def _put(
        self,
        member: GroupMember,
        request: messages.NumberedRequest,
        body: messages.PushGradients | messages.Initialise,
        message: Message,
    ) -> None:
        """Receive gradients or initial weights, which go to the parent later."""
        slot = member.slot
        if message.payload_bytes:
            if message.payload_bytes != slot.gradients.numel():
                raise ConnectionLostError(f"a payload of {message.payload_bytes} bytes is not a gradient of this run")
            if request.sequence > slot.sequence:
                member.connection.receive_payload(memory_of(slot.gradients))
        with self._lock:
            if not member.is_new(request.sequence):
                return
            member.request = message.header
            if isinstance(body, messages.PushGradients):
                self._bundle.push(member.line, body.samples, body.units)
                self._pass_on_what_is_due()
            elif self._parent is not None:
                self._parent.send_together([member], 0, slot.gradients)

    def _again(self, member: GroupMember, sequence: int) -> None:
        """Repeat the answer, ask for a request that did not arrive, or tell the worker to wait."""
        with self._lock:
            slot = member.slot
            if sequence > slot.sequence:
                member.connection.send(encode(messages.Resend(sequence=sequence)), wait=False)
            elif sequence == slot.sequence and not slot.resend():
                member.connection.send(encode(messages.Pending(sequence=sequence, events=self._events)), wait=False)

    def _pass_on(self, member: GroupMember, asked: messages.Asked, payload: bytes | bytearray) -> None:
        with self._lock:
            if member.gone:
                raise ConnectionLostError("the worker was given up")
            if isinstance(asked, messages.Start):
                self._learn(bytes(payload))
                member.rank = asked.rank
                self._presence.joined(member.line, asked.timeout, self._now)
            member.done = member.done or isinstance(asked, messages.Goodbye)
            self._members[member.line] = member
            try:
                passed_on = group_messages.FromLine(line=member.line, message=Raw(encode(asked)))
                self._reach_parent().send_queue.send(passed_on, memoryview(payload))
            except ValueError as error:
                raise ProtocolError("a message is too long to be passed to the parent") from error
            self._pass_on_what_is_due()

    def _learn(self, description: bytes) -> None:
        """Learn the layout of the run. The parent checks that all workers describe the same run."""
        if self._layout is None:
            with suppress(EvenstepError):  # The parent answers with the error.
                self._layout = RunSpec.decode(description, self._workers).layout.shards(1)[0]

    def lost(self, member: GroupMember) -> None:
        """Take in that the worker's connection has ended. The worker has ended too, or will join again."""
        with self._lock:
            self._end(member)

    def _end(self, member: GroupMember, hung: float | None = None) -> None:
        if self._members.get(member.line) is member and self._parent is not None:
            self._parent.send_queue.send(group_messages.LineEnded(line=member.line, hung=hung))
        self._forget(member)
        self._pass_on_what_is_due()

    def _forget(self, member: GroupMember) -> None:
        self._members.pop(member.line, None)
        self._presence.left(member.line)
        self._bundle.leave(member.line)
        member.leave()

    def _expect(self, members: Iterable[GroupMember]) -> None:
        """Expect these workers back, unless they had said goodbye."""
        self._away |= {member.rank for member in members if member.started and not member.done}

    # To the parent.

    def _reach_parent(self) -> Parent:
        if self._parent is None:
            self._parent = parent = Parent(self._connect())
            parent.send_queue.send(messages.ServeGroup())
            threading.Thread(target=self._hear, args=(parent,), name="evenstep-parent", daemon=True).start()
        return self._parent

    def _pass_on_what_is_due(self) -> None:
        parent, layout = self._parent, self._layout
        if parent is None or layout is None:
            return  # No worker has joined yet, or the parent was lost.
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
        try:
            while True:
                message = parent.connection.receive(self._patience_seconds)
                said = decode(group_messages.TO_GROUP, message.header)
                answer = (
                    decode(messages.ANSWERED, bytes(said.message)) if isinstance(said, group_messages.ToLine) else None
                )
                payload = bytearray()
                if isinstance(answer, messages.NumberedReply) and answer.weights and message.payload_bytes:
                    parent.receive_weights(message)
                else:
                    payload = self._payload_of(parent.connection, message)
                with self._lock:
                    self._told(parent, said, answer, payload)
        except (ConnectionLostError, SilentError, ProtocolError):
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
        """Receive the payload of a message that is passed on unchanged."""
        nbytes = 0 if self._layout is None else self._layout.nbytes
        if message.payload_bytes > MAX_BYTES + MAX_STATES * nbytes:
            raise ConnectionLostError(f"a payload of {message.payload_bytes} bytes is too large for this run")
        payload = bytearray(message.payload_bytes)
        connection.receive_payload(memoryview(payload))
        return payload

    def _told(
        self, parent: Parent, said: group_messages.ToGroup, answer: messages.Answered | None, payload: bytearray
    ) -> None:
        if isinstance(said, group_messages.TogetherRefused):
            self._bundle.refuse(said.number)
            self._pass_on_what_is_due()
            return
        if isinstance(said, messages.Refusal):
            raise ConnectionLostError(f"the parent refused this group server: {said.error}")
        member = self._members.get(said.line)
        if member is None or isinstance(answer, messages.Pong):
            return
        self._events += 1
        try:
            if isinstance(said, group_messages.LineClosed):
                self._expect([member])
                self._forget(member)
                self._pass_on_what_is_due()
            else:
                assert answer is not None
                self._answer(member, parent, bytes(said.message), answer, payload)
        except ConnectionLostError:
            self.lost(member)

    def _answer(
        self, member: GroupMember, parent: Parent, header: bytes, answer: messages.Answered, payload: bytearray
    ) -> None:
        if isinstance(answer, messages.Placed):
            slot = member.take_place(answer.incarnation, answer.nbytes)
            self._bundle.join(member.line)
            self._away.discard(member.rank)
            member.connection.send(header, files=slot.files, wait=False)
        elif (
            isinstance(answer, messages.NumberedReply | messages.Refusal)
            and member.started
            and answer.sequence == member.slot.sequence
        ):
            weights, body = isinstance(answer, messages.NumberedReply) and answer.weights, getattr(answer, "body", None)
            if weights:
                member.slot.weights.copy_(parent.weights)
            claims, over = (len(body.claims), body.over) if isinstance(body, messages.Grant) else (0, False)
            self._bundle.answer(member.line, claims, over=over)
            member.slot.answer(header, weights=weights)
        else:
            # The other workers must not wait until this one has received, for example, an optimizer state.
            SendQueue(member.connection).send_last(answer, memoryview(payload))
