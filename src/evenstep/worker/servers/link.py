"""A worker's line to the servers: requests and their answers, over a connection to each shard, and a pulse.

A request is asked again where its answer does not come, and connections are made again where they break, so whoever
calls sees an answer, or that this worker was given up for dead, or an error that says which server is gone.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NoReturn, TypeVar, final

import numpy as np

from evenstep.core.errors import ConfigError, DisagreementError, EvenstepError, ProtocolError, WorkerLostError
from evenstep.transport.base import Connection, ConnectionLostError, Header, Message, SilentError
from evenstep.transport.segment import Segment
from evenstep.worker.activity import Activity

ASK_AGAIN: Final = 0.25
"""After this part of the heartbeat a worker asks again for an answer that has not come."""
RETRY_SECONDS: Final = 0.2
MAX_TRIES: Final = 3
"""How often a worker asks for what is no request of a run, such as a state, before it gives the servers up."""
ABSENT_SECONDS: Final = 2.0
"""How long a worker waits to hear which others have not come."""
POLL_SECONDS: Final = 0.2
"""How often the pulse looks whether it is to end."""

_ERRORS: Final = {each.__name__: each for each in (ConfigError, DisagreementError, ProtocolError)}


_Result = TypeVar("_Result")


class ExpiredError(EvenstepError):
    """The servers gave this worker up for dead, or have gone back to a snapshot: it has started anew."""


@final
class RemoteShard:
    """One server as this worker sees it.

    `gradients` and `weights` are a message each, uint8; on one host they are shared with the server. `payload` is the
    message of gradients in pieces that lie elsewhere, where it is not in `gradients`.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.connection: Connection | None = None
        self.segment: Segment | None = None
        self.incarnation = -1
        """Whose place this is."""
        self.gradients = self.weights = np.empty(0, dtype=np.uint8)
        self.payload: list[memoryview] | None = None

    def take_place(self, message: Message, nbytes: int, incarnation: int) -> None:
        """Use the segment that came with the answer, or memory of this process's own."""
        self._leave_segment()
        self.incarnation = incarnation
        if message.files:
            self.segment = Segment.open(message.files[0], 2 * nbytes)
            # The array keeps the mapping: parameters still live in it when it is closed.
            both = np.frombuffer(self.segment.view, dtype=np.uint8)
        else:
            both = np.zeros(2 * nbytes, dtype=np.uint8)
        self.gradients, self.weights = both[:nbytes], both[nbytes:]

    def close(self) -> None:
        """End the connection; shared memory lasts as long as it is viewed."""
        if self.connection is not None:
            self.connection.close()
        self.connection = None
        self._leave_segment()

    def _leave_segment(self) -> None:
        if self.segment is not None:
            self.segment.close()
        self.segment = None


@final
@dataclass(slots=True)
class _Request:
    """What is being asked, so that it can be asked again."""

    fields: Header
    sequence: int
    gradients: bool
    """Whether the messages in `gradients` go with it."""


@dataclass(slots=True)
class _Wait:
    """A wait for an answer: when it was asked for last, when the server last said anything, and when it last got on.

    A server whose work goes on tells so by counting what happens there; one that only repeats itself does not get on.
    """

    asked: float
    limit: float
    heard: float = field(init=False)
    moved: float = field(init=False)
    events: object = None

    def __post_init__(self) -> None:
        self.heard = self.moved = self.asked

    def hear(self, header: Header, now: float) -> None:
        self.heard = now
        if header.get("events") not in (None, self.events):
            self.events, self.moved = header["events"], now
        if "answer" in header or "staged" in header or "resend" in header:
            self.asked = now


@final
class Link:
    """One worker's requests, one at a time; the pulse runs in a thread of its own.

    Args:
        rank: The worker.
        connect: Makes a connection to the shard of this index.
        shards: How many there are.
        timeout_seconds: How long a server may be gone.
        activity: What the main thread does, which the pulse tells.
        clock, wait: Seconds that do not go back, and how to let some pass.
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
        """The version of the weights in `weights`."""
        self.shards = [RemoteShard(index) for index in range(shards)]
        self._connect = connect
        self._timeout = timeout_seconds
        self._activity = Activity() if activity is None else activity
        self._clock = clock
        self._wait = wait
        self._heartbeat = timeout_seconds
        self._sequence = 0
        self._described = b""
        self._records: list[bytes] = []
        """What this worker has told the others, one for each time that they met."""
        self._gone: WorkerLostError | None = None
        self.hosting: list[Callable[[], None]] = []
        """Each ends servers that this process hosts, once all others are done with them."""
        self._request: _Request | None = None
        self._closed = threading.Event()
        self._pulse: threading.Thread | None = None

    # Before a run.

    def meet(self, record: bytes) -> list[bytes]:
        """Every worker's record, once all have come; workers may meet several times, all of them alike.

        Raises:
            WorkerLostError: Not all came in time.
        """
        self._records.append(record)
        deadline = self._clock() + self._timeout
        while True:
            try:
                return self._meet(deadline)
            except SilentError as error:
                missing = ", ".join(map(str, self._absent())) or "unknown"
                raise WorkerLostError(
                    f"not all workers came within {self._timeout:g} s (missing: {missing}): look at their output"
                ) from error
            except ConnectionLostError as error:
                self.shards[0].close()
                if self._clock() > deadline:
                    self._give_up(error, error)
                self._wait(RETRY_SECONDS)

    def _meet(self, deadline: float) -> list[bytes]:
        self._reach(self.shards[0])
        connection = self._line(self.shards[0])
        self._send_record(len(self._records) - 1)
        while True:
            message = connection.receive(max(0.0, deadline - self._clock()))
            if "error" in message.header:
                _refuse(message.header)
            if "lengths" in message.header:
                break
        lengths = [int(each) for each in message.header["lengths"]]  # type: ignore[attr-defined]
        records = [bytearray(length) for length in lengths]
        connection.receive_payload(*(memoryview(each) for each in records))
        return [bytes(each) for each in records]

    def _absent(self) -> list[object]:
        """The ranks of some of those who have not come; none where the server does not say."""
        with suppress(SilentError, ConnectionLostError):
            connection = self._line(self.shards[0])
            connection.send({"op": "absent"})
            while True:
                absent = connection.receive(ABSENT_SECONDS).header.get("absent")
                if isinstance(absent, list):
                    return absent
        return []

    def move(self, connect: Callable[[int], Connection]) -> None:
        """Speak to other servers from now on, before this worker has taken its place."""
        for shard in self.shards:
            shard.close()
        self._connect = connect

    def start(self, described: bytes, nbytes: Sequence[int]) -> None:
        """Take this worker's place at every shard; `described` is the run, `nbytes` the length of a message of each.

        Raises:
            ConfigError, DisagreementError: The servers cannot run this, or run something else.
        """
        self._described = described
        self._nbytes = tuple(nbytes)
        try:
            self._take_places()
        except ConnectionLostError as error:
            with suppress(ExpiredError):  # Nothing has begun that could be lost.
                self._come_back(error)
        if self._pulse is None:
            self._pulse = threading.Thread(target=self._beat, name="evenstep-pulse")
            self._pulse.start()

    # A run.

    def ask(self, operation: str, *, gradients: bool = False, **fields: object) -> Header:
        """Send a request and wait for its answer, with the weights of every shard where they come with it.

        Raises:
            ExpiredError: The request was not carried out, and this worker has started anew.
            WorkerLostError: The servers are gone.
            ConfigError, DisagreementError, ProtocolError: As the servers say.
        """
        self.send(operation, gradients=gradients, **fields)
        return self.collect()

    def send(self, operation: str, *, gradients: bool = False, **fields: object) -> None:
        """Send a request, whose answer `collect` waits for; nothing else may be asked in between."""
        self._sequence += 1
        header = {"op": operation, "seq": self._sequence, "has": self.has, **fields}
        self._request = _Request(header, self._sequence, gradients)
        try:
            self._retrying(self._send)
        except BaseException:
            self._request = None  # Nobody will answer what was not sent.
            raise

    def collect(self) -> Header:
        """Wait for the answer to what was sent."""
        try:
            answer = self._retrying(self._collect)
        except Exception:
            self._request = None
            raise
        self._request = None
        if "error" in answer:
            _refuse(answer)
        if answer.get("weights"):
            self.has = int(answer["version"])  # type: ignore[call-overload]
        return answer

    def fetch_states(self) -> list[bytearray]:
        """The optimizer's state as each server has it, encoded by `tensors.states`.

        Raises:
            ExpiredError: This worker has started anew: ask again.
            WorkerLostError: The servers are gone.
            ConfigError, DisagreementError, ProtocolError: As the servers say.
        """
        return [self._retrying(partial(self._fetch, shard)) for shard in self.shards]

    def load_states(self, encoded: Sequence[Sequence[memoryview]]) -> None:
        """Have the optimizer go on from these states, one for each server, encoded by `tensors.states`.

        Raises:
            ConfigError: They are none of this optimizer's.
            ExpiredError: This worker has started anew: load again.
            WorkerLostError: The servers are gone.
        """
        for shard, own in zip(self.shards, encoded, strict=True):
            self._retrying(partial(self._load, shard, own))

    @property
    def asking(self) -> bool:
        """Whether an answer is still to be collected."""
        return self._request is not None

    def close(self) -> None:
        """Say goodbye, so that nobody takes this worker for dead."""
        self._closed.set()
        for shard in self.shards:
            connection = shard.connection
            if connection is not None:
                with suppress(ConnectionLostError):
                    connection.send({"op": "goodbye", "seq": self._sequence + 1})
            shard.close()
            # Parameters that live there keep it; this object may be kept by others, for long.
            shard.gradients = shard.weights = np.empty(0, dtype=np.uint8)
            shard.payload = None
        # Those of a group before those that they pass on to.
        for end in reversed(self.hosting):
            end()

    # In between.

    def _retrying(self, attempt: Callable[[], _Result]) -> _Result:
        tries = 0
        with self._activity.waiting():
            while True:
                tries += 1
                if self._gone is not None:
                    raise self._gone
                if self._closed.is_set():
                    raise ConfigError("this run was closed: call prepare for another one")
                try:
                    return attempt()
                except ConnectionLostError as error:
                    if self._request is None and tries >= MAX_TRIES:
                        self._give_up(error, error)
                    if not self._closed.is_set():
                        self._come_back(error)

    def _come_back(self, error: ConnectionLostError) -> None:
        """Connect anew, and take the old place where it is kept.

        Raises:
            ExpiredError: It is not.
            WorkerLostError: The servers do not come back.
        """
        deadline = self._clock() + self._timeout
        before = self.incarnation
        while True:
            for shard in self.shards:
                shard.close()
            try:
                self._take_places()
                if self.incarnation == before:
                    if self._request is not None:
                        self._send()
                    return
                self._meet_again()
                break
            except ConnectionLostError as again:
                if self._clock() > deadline:
                    self._give_up(again, error)
                self._wait(RETRY_SECONDS)
        self._request = None
        raise ExpiredError("this worker was given up for dead, or the servers were started anew")

    def _give_up(self, last: ConnectionLostError, first: ConnectionLostError) -> NoReturn:
        raise self._no_use(f"the servers did not answer for {self._timeout:g} s ({last})") from first

    def _no_use(self, why: str) -> WorkerLostError:
        """The error to raise, now and at every further request: it makes no sense to wait for the servers."""
        self._gone = WorkerLostError(f"{why}: look at the servers' output, then start again")
        return self._gone

    def _meet_again(self) -> None:
        """Send this worker's records to restarted servers, without asking for those of the others, which it knows."""
        for number in range(len(self._records)):
            self._send_record(number, known=True)

    def _send_record(self, number: int, **known: bool) -> None:
        header = {"op": "meet", "rank": self.rank, "seq": 0, "round": number, **known}
        self._line(self.shards[0]).send(header, memoryview(self._records[number]))

    def _take_places(self) -> None:
        for shard, nbytes in zip(self.shards, self._nbytes, strict=True):
            self._reach(shard)
            place = {"rank": self.rank, "incarnation": self.incarnation, "has": self.has}
            header = {"op": "start", "seq": 0, **place, "timeout": self._timeout, "process": os.getpid()}
            self._line(shard).send(header, memoryview(self._described))
            message = self._next(shard, lambda header: "incarnation" in header or "error" in header, placed=False)
            self._take_place(shard, message, nbytes)

    def _take_place(self, shard: RemoteShard, message: Message, nbytes: int) -> None:
        answer = message.header
        if "error" in answer or answer["nbytes"] != nbytes:
            for file in message.files:
                os.close(file)
            if "error" in answer:
                _refuse(answer)
            raise ProtocolError(f"server {shard.index} has messages of {answer['nbytes']} bytes, not of {nbytes}")
        if shard.index == 0:
            self._heartbeat = float(answer["heartbeat"])  # type: ignore[arg-type]
            incarnation = int(answer["incarnation"])  # type: ignore[call-overload]
            if incarnation != self.incarnation:
                self.incarnation, self.has, self._sequence = incarnation, -1, 0
        known = shard.incarnation == self.incarnation
        if message.files or not known:
            shard.take_place(message, nbytes, self.incarnation)
        if message.files and known:
            # Other memory in an old place: what was in the former is lost, so the place has to be a new one.
            self.incarnation = -1
            raise ConnectionLostError(f"server {shard.index} has forgotten this worker's place")

    def _send(self) -> Header:
        request = self._request
        assert request is not None
        if request.gradients:
            for shard in self.shards[1:]:
                self._send_to(shard, {"op": "stage", "seq": request.sequence})
            for shard in self.shards[1:]:
                self._next(shard, lambda header: header.get("staged") == request.sequence)
        self._send_to(self.shards[0], request.fields, payload=request.gradients)
        return {}

    def _send_to(self, shard: RemoteShard, header: Header, *, payload: bool = True) -> None:
        travels: list[memoryview] = []
        if payload and shard.segment is None:
            travels = [shard.gradients.data] if shard.payload is None else shard.payload
        self._line(shard).send(header, *travels)

    def _collect(self) -> Header:
        request = self._request
        assert request is not None
        answer: Header = {}
        for shard in self.shards:
            if shard.index and not answer.get("weights"):
                break
            message = self._next(shard, lambda header: header.get("answer") == request.sequence)
            if message.payload_bytes:
                if message.payload_bytes != shard.weights.size:
                    raise ConnectionLostError(f"server {shard.index} sent {message.payload_bytes} bytes of weights")
                self._line(shard).receive_payload(shard.weights.data)
            answer = message.header if not shard.index else answer
        return answer

    def _fetch(self, shard: RemoteShard) -> bytearray:
        connection = self._line(shard)
        connection.send({"op": "states"})
        message = self._next(shard, lambda header: "states" in header or "error" in header)
        if "error" in message.header:
            _refuse(message.header)
        payload = bytearray(message.payload_bytes)
        connection.receive_payload(memoryview(payload))
        return payload

    def _load(self, shard: RemoteShard, encoded: Sequence[memoryview]) -> None:
        self._line(shard).send({"op": "load_states"}, *encoded)
        message = self._next(shard, lambda header: "loaded" in header or "error" in header)
        if "error" in message.header:
            _refuse(message.header)

    def _next(self, shard: RemoteShard, wanted: Callable[[Header], bool], *, placed: bool = True) -> Message:
        """The next message of that kind, asked for again now and then while a request waits to be answered.

        Without a place (`placed` False) nothing is asked for: the server would refuse it.

        Raises:
            ConnectionLostError: The server said nothing for as long as its heartbeat.
            WorkerLostError: The server lives, but nothing comes of it within the timeout.
        """
        connection = self._line(shard)
        wait = _Wait(self._clock(), self._heartbeat if self._request is not None else self._timeout)
        while True:
            try:
                message = connection.receive(max(0.0, wait.asked + self._heartbeat * ASK_AGAIN - self._clock()))
            except SilentError as error:
                if self._clock() - wait.heard > wait.limit:
                    raise ConnectionLostError(f"server {shard.index} is silent") from error
                if self._request is not None and placed:
                    connection.send({"op": "again", "seq": self._request.sequence})
                wait.asked = self._clock()
                continue
            wait.hear(message.header, self._clock())
            if wanted(message.header):
                return message
            if self._clock() - wait.moved > self._timeout + 2 * self._heartbeat:
                raise self._no_use(f"server {shard.index} did not answer for {self._timeout:g} s although it runs")
            self._take_notice(message.header)

    def _take_notice(self, header: Header) -> None:
        """Of a message that another was awaited instead of."""
        if self._request is None:
            return
        if "error" in header and header.get("answer") == self._request.sequence:
            _refuse(header)
        if "resend" in header:
            self._send()

    def _reach(self, shard: RemoteShard) -> None:
        if shard.connection is None:
            shard.connection = self._connect(shard.index)

    def _line(self, shard: RemoteShard) -> Connection:
        if shard.connection is None:
            raise ConnectionLostError(f"the connection to server {shard.index} was closed")
        return shard.connection

    def _pulse_message(self) -> Header:
        seen = self._activity.read()
        return {"op": "ping", "doing": seen.doing, "iteration": seen.iteration, "seconds": seen.seconds}

    def _beat(self) -> None:
        main = threading.main_thread()
        while main.is_alive() and not self._closed.is_set():
            for shard in self.shards:
                connection = shard.connection
                if connection is not None:
                    try:
                        connection.send(self._pulse_message())
                    except ConnectionLostError:
                        continue  # Whoever waits on it finds out.
            until = time.monotonic() + self._heartbeat * ASK_AGAIN
            while main.is_alive() and not self._closed.is_set() and (left := until - time.monotonic()) > 0:
                # Joining the main thread is a sleep that ends early when the script does.
                main.join(min(left, POLL_SECONDS))
        # A script has no place where it would close what prepare opened. One that failed is not done, only gone.
        if not self._closed.is_set() and getattr(sys, "last_value", None) is None:
            self.close()


def _refuse(answer: Header) -> NoReturn:
    """Raise the error that a server answered with."""
    raise _ERRORS.get(str(answer.get("kind")), ProtocolError)(str(answer["error"]))
