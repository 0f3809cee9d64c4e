"""A worker's requests to the servers. Shard 0 decides; gradients and weights go to and come from every shard.

A request is repeated while its answer is missing, and broken connections are made again. The caller gets an answer, an
`ExpiredError` if the servers gave this worker up, or an error that names the lost server.
"""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, NoReturn, TypeVar, final

from evenstep.core.errors import ConfigError, EvenstepError, ProtocolError
from evenstep.protocol import messages
from evenstep.transport.base import Connection, ConnectionLostError, Message
from evenstep.transport.codec import close_files
from evenstep.worker.activity import Activity
from evenstep.worker.servers.meeting import RETRY_SECONDS, Meeting, servers_gone
from evenstep.worker.servers.remote_shard import RemoteShard
from evenstep.worker.servers.replies import PendingRequest, Replies

POLL_SECONDS: Final = 0.2
"""How often the pulse checks whether it has to end."""
MAX_TRIES: Final = 3
"""How often a worker asks for something outside a run, such as a state, before it gives the servers up."""

_Result = TypeVar("_Result")


class ExpiredError(EvenstepError):
    """The servers gave this worker up or went back to a snapshot. It has joined again as a new incarnation."""


@final
class ServerLink:
    """One worker's requests, one at a time. A separate thread sends the pulse.

    Args:
        rank: The worker.
        connect: Connects to the shard of an index.
        shards: The number of shards.
        timeout_seconds: How long a server may be unreachable.
        activity: The activity of the main thread, which the pulse reports.
        clock: A clock in seconds that does not go back.
        wait: Sleeps for some seconds.

    Attributes:
        incarnation: The number that the servers gave this worker; -1 before it has a place.
        has: The version of the weights in the shards' buffers; -1 if none.
        hosting: Functions that end servers hosted by this process, once no worker needs them.
    """

    def __init__(
        self,
        rank: int,
        connect: Callable[[int], Connection],
        shards: int,
        *,
        timeout_seconds: float,
        activity: Activity | None = None,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self.rank = rank
        self.incarnation = -1
        self.has = -1
        self.shards = [RemoteShard(index, connect) for index in range(shards)]
        self.hosting: list[Callable[[], None]] = []
        self._timeout = timeout_seconds
        self._activity = Activity() if activity is None else activity
        self._clock = clock
        self._wait = wait
        self._replies = Replies(timeout_seconds, clock, self._send)
        self._sequence = 0
        self._described = b""
        self._nbytes: tuple[int, ...] = ()
        self._meeting = Meeting(rank, self.shards[0], timeout_seconds, clock, wait)
        self._closed = threading.Event()
        self._pulse: threading.Thread | None = None

    # Before a run.

    def meet(self, record: bytes) -> list[bytes]:
        """Exchange records with all workers; return them by rank. All workers must meet equally often.

        Raises:
            WorkerLostError: A worker did not arrive in time.
        """
        return self._meeting.meet(record)

    def move(self, connect: Callable[[int], Connection]) -> None:
        """Use other servers from now on. Call it before `start`."""
        for shard in self.shards:
            shard.close()
            shard.connect = connect

    def start(self, described: bytes, nbytes: Sequence[int]) -> None:
        """Take a place at every shard.

        Args:
            described: The encoded `RunSpec`.
            nbytes: The length of a message of gradients or weights, for each shard.

        Raises:
            ConfigError, DisagreementError: The servers cannot run this, or run something else.
        """
        self._described = described
        self._nbytes = tuple(nbytes)
        try:
            self._take_places()
        except ConnectionLostError as error:
            with suppress(ExpiredError):  # Nothing has begun, so nothing is lost.
                self._come_back(error)
        if self._pulse is None:
            self._pulse = threading.Thread(target=self._beat, name="evenstep-pulse")
            self._pulse.start()

    # A run.

    def ask(self, body: messages.RequestBody, *payload: memoryview, gradients: bool = False) -> messages.NumberedReply:
        """Send a request and wait for its answer, and for the weights of every shard if it announces them.

        Raises:
            ExpiredError: The request was not carried out, and this worker has joined again.
            WorkerLostError: The servers are lost.
            ConfigError, DisagreementError, ProtocolError: The servers refused.
        """
        self.send(body, *payload, gradients=gradients)
        return self.collect()

    def send(self, body: messages.RequestBody, *payload: memoryview, gradients: bool = False) -> None:
        """Send a request, and nothing else before `collect` has returned its answer."""
        self._sequence += 1
        request = messages.NumberedRequest(sequence=self._sequence, has=self.has, body=body)
        self._replies.asked = PendingRequest(request, gradients, payload)
        for shard in self.shards:
            shard.arriving = None
        try:
            self._retrying(self._send)
        except BaseException:
            self._replies.asked = None  # No server will answer what was not sent.
            raise

    def collect(self) -> messages.NumberedReply:
        """Wait for the answer to the request that was sent; errors as for `ask`."""
        try:
            answer = self._retrying(self._collect)
        except Exception:
            self._replies.asked = None
            raise
        self._replies.asked = None
        if answer.weights:
            self.has = answer.version
        for shard in self.shards:  # Once, since an answer may have come again meanwhile.
            if shard.arriving is not None:
                shard.differences.append(shard.arriving)
        return answer

    def fetch_states(self) -> list[bytearray]:
        """Return the optimizer state of each server, encoded by `tensors.states`; errors as for `ask`."""
        return [self._retrying(partial(self._fetch, shard)) for shard in self.shards]

    def load_states(self, encoded: Sequence[Sequence[memoryview]]) -> None:
        """Let the optimizer continue from these states, one for each server, encoded by `tensors.states`.

        Raises:
            ConfigError: The states belong to another optimizer.
            ExpiredError: This worker has joined again: load again.
            WorkerLostError: The servers are lost.
        """
        for shard, own in zip(self.shards, encoded, strict=True):
            self._retrying(partial(self._load, shard, own))

    @property
    def asking(self) -> bool:
        """True while a request is unanswered."""
        return self._replies.asked is not None

    def close(self) -> None:
        """Leave the servers and end the connections."""
        self._closed.set()
        for shard in self.shards:
            with suppress(ConnectionLostError):
                shard.send(messages.Goodbye())
            shard.forget()
        # Group servers before their parents.
        for end in reversed(self.hosting):
            end()

    def _beat(self) -> None:
        """Send a `Ping` to every shard in each period, in a thread, until the link is closed or the main thread ends.

        If the main thread has ended without an error, the link is closed, since a script has no place where it would
        close what `prepare` opened. After an error the worker counts as lost, not as done.
        """
        main, due = threading.main_thread(), 0.0
        while main.is_alive() and not self._closed.is_set():
            if time.monotonic() >= due:
                seen = self._activity.read()
                ping = messages.Ping(doing=seen.doing, iteration=seen.iteration, seconds=seen.seconds)
                for shard in self.shards:
                    with suppress(ConnectionLostError):  # The main thread handles it.
                        shard.send(ping)
                due = time.monotonic() + self._replies.period()
            # A sleep that ends early when the script does.
            main.join(min(max(due - time.monotonic(), 0.0), POLL_SECONDS))
        if not self._closed.is_set() and getattr(sys, "last_value", None) is None:
            self.close()

    # Connections and places.

    def _retrying(self, attempt: Callable[[], _Result]) -> _Result:
        tries = 0
        with self._activity.waiting():
            while True:
                tries += 1
                if self._replies.lost is not None:
                    raise self._replies.lost
                if self._closed.is_set():
                    raise ConfigError("this run was closed: start another one")
                try:
                    return attempt()
                except ConnectionLostError as error:
                    if self._replies.asked is None and tries >= MAX_TRIES:
                        self._give_up(error, error)
                    if not self._closed.is_set():
                        self._come_back(error)

    def _come_back(self, error: ConnectionLostError) -> None:
        """Connect again and take the former place; ExpiredError if the servers no longer had it."""
        deadline = self._clock() + self._timeout
        before = self.incarnation
        while True:
            for shard in self.shards:
                shard.close()
            try:
                self._take_places()
                if self.incarnation == before:
                    if self._replies.asked is not None:
                        self._send()
                    return
                self._meeting.repeat()
                break
            except ConnectionLostError as again:
                if self._clock() > deadline:
                    self._give_up(again, error)
                self._wait(RETRY_SECONDS)
        self._replies.asked = None
        raise ExpiredError("the servers gave this worker up, or were restarted")

    def _give_up(self, last: ConnectionLostError, first: ConnectionLostError) -> NoReturn:
        """Fail this request and all later ones."""
        self._replies.lost = servers_gone(self._timeout, last)
        raise self._replies.lost from first

    def _take_places(self) -> None:
        for shard, nbytes in zip(self.shards, self._nbytes, strict=True):
            shard.reach()
            start = messages.Start(rank=self.rank, incarnation=self.incarnation, has=self.has, timeout=self._timeout)
            shard.send(start, memoryview(self._described))
            placed, message = self._replies.next(shard, messages.Placed, placed=False)
            self._take_place(shard, placed, message, nbytes)

    def _take_place(self, shard: RemoteShard, placed: messages.Placed, message: Message, nbytes: int) -> None:
        if placed.nbytes != nbytes:
            close_files(message.files)
            raise ProtocolError(f"server {shard.index} has messages of {placed.nbytes} bytes, not of {nbytes}")
        if shard.index == 0:
            self._replies.heartbeat_seconds = placed.heartbeat
            if placed.incarnation != self.incarnation:
                self.incarnation, self.has, self._sequence = placed.incarnation, -1, 0
        known = shard.incarnation == self.incarnation
        if message.files or not known:
            shard.take_place(message.files, nbytes, self.incarnation)
        if message.files and known:
            # New memory in the former place: the old content is lost, so this worker needs a new place.
            self.incarnation = -1
            raise ConnectionLostError(f"server {shard.index} has forgotten this worker's place")

    # Messages.

    def _send(self) -> None:
        asked = self._replies.asked
        assert asked is not None
        sequence = asked.request.sequence
        if asked.gradients:
            for shard in self.shards[1:]:
                shard.send(messages.Stage(sequence=sequence), *self._gradients(shard))
            for shard in self.shards[1:]:
                self._replies.next(shard, messages.Staged, sequence)
        self.shards[0].send(asked.request, *(self._gradients(self.shards[0]) if asked.gradients else asked.payload))

    def _gradients(self, shard: RemoteShard) -> list[memoryview]:
        """Return the payload of a message of gradients; empty if they are in shared memory."""
        if shard.shared:
            return []
        return [shard.gradients.data] if shard.payload is None else shard.payload

    def _collect(self) -> messages.NumberedReply:
        asked = self._replies.asked
        assert asked is not None
        answer = self._collect_from(self.shards[0], asked.request.sequence)
        if answer.weights:
            for shard in self.shards[1:]:
                self._collect_from(shard, asked.request.sequence)
        return answer

    def _collect_from(self, shard: RemoteShard, sequence: int) -> messages.NumberedReply:
        answer, message = self._replies.next(shard, messages.NumberedReply, sequence)
        if message.payload_bytes and answer.narrow:
            if message.payload_bytes != shard.narrow_bytes:
                raise ConnectionLostError(f"server {shard.index} sent {message.payload_bytes} bytes of a difference")
            shard.arriving = bytearray(shard.narrow_bytes)
            shard.receive_payload(memoryview(shard.arriving))
        elif message.payload_bytes:
            if message.payload_bytes != shard.weights.size:
                raise ConnectionLostError(f"server {shard.index} sent {message.payload_bytes} bytes of weights")
            shard.receive_payload(shard.weights.data)
        return answer

    def _fetch(self, shard: RemoteShard) -> bytearray:
        shard.send(messages.States())
        _, message = self._replies.next(shard, messages.States)
        payload = bytearray(message.payload_bytes)
        shard.receive_payload(memoryview(payload))
        return payload

    def _load(self, shard: RemoteShard, encoded: Sequence[memoryview]) -> None:
        shard.send(messages.LoadStates(), *encoded)
        self._replies.next(shard, messages.Loaded)
