"""A worker's line to the servers: requests and their answers, over a connection to each shard, and a pulse.

A request is asked again where its answer does not come, and connections are made again where they break, so whoever
calls sees an answer, or that this worker was given up for dead, or an error that says which server is gone.
"""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, final

import numpy as np
import torch

from evenstep.core.errors import ConfigError, DisagreementError, EvenstepError, ProtocolError, WorkerLostError
from evenstep.runtime.server.state_message import decode_states, encode_states
from evenstep.runtime.server.updates import State
from evenstep.runtime.tensor_memory import memory_of
from evenstep.transport.base import Connection, ConnectionLostError, Header, Message, SilentError
from evenstep.transport.segment import Segment

ASK_AGAIN: Final = 0.25
"""After this part of the heartbeat a worker asks again for an answer that has not come."""
RETRY_SECONDS: Final = 0.2

_ERRORS: Final = {each.__name__: each for each in (ConfigError, DisagreementError, ProtocolError)}


class ExpiredError(EvenstepError):
    """The servers gave this worker up for dead, or have gone back to a snapshot: it has started anew."""


@final
class Shard:
    """One server as this worker sees it.

    `gradients` and `weights` are a message each, uint8; on one host they are shared with the server. `payload` is the
    message of gradients in pieces that lie elsewhere, where it is not in `gradients`.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.connection: Connection | None = None
        self.segment: Segment | None = None
        self.gradients = self.weights = torch.empty(0, dtype=torch.uint8)
        self.payload: list[memoryview] | None = None

    def take_place(self, message: Message, nbytes: int) -> None:
        """Use the segment that came with the answer, or memory of this process's own."""
        if self.segment is not None:
            self.segment.close()
            self.segment = None
        if message.files:
            self.segment = Segment.open(message.files[0], 2 * nbytes)
            # Not torch.frombuffer, which does not keep the mapping: parameters still live in it when it is closed.
            both = torch.from_numpy(np.frombuffer(self.segment.view, dtype=np.uint8))
        else:
            both = torch.zeros(2 * nbytes, dtype=torch.uint8)
        self.gradients, self.weights = both[:nbytes], both[nbytes:]

    def close(self) -> None:
        """End the connection."""
        if self.connection is not None:
            self.connection.close()
        self.connection = None


@final
@dataclass(slots=True)
class _Request:
    """What is being asked, so that it can be asked again."""

    fields: Header
    sequence: int
    gradients: bool
    """Whether the messages in `gradients` go with it."""


@final
class Link:
    """One worker's requests, one at a time; the pulse runs in a thread of its own.

    Args:
        rank: The worker.
        connect: Makes a connection to the shard of this index.
        shards: How many there are.
        timeout_seconds: How long a server may be gone.
        clock, wait: Seconds that do not go back, and how to let some pass.
    """

    def __init__(
        self,
        rank: int,
        connect: Callable[[int], Connection],
        shards: int,
        *,
        timeout_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self.rank = rank
        self.incarnation = -1
        self.has = -1
        """The version of the weights in `weights`."""
        self.shards = [Shard(index) for index in range(shards)]
        self._connect = connect
        self._timeout = timeout_seconds
        self._clock = clock
        self._wait = wait
        self._heartbeat = timeout_seconds
        self._sequence = 0
        self._described = b""
        self._request: _Request | None = None
        self._closed = threading.Event()
        self._pulse: threading.Thread | None = None

    # Before a run.

    def meet(self, record: bytes) -> list[bytes]:
        """Every worker's record, once all have come.

        Raises:
            WorkerLostError: Not all came in time.
        """
        self._reach(self.shards[0])
        deadline = self._clock() + self._timeout
        connection = self._line(self.shards[0])
        connection.send({"op": "meet", "rank": self.rank, "seq": 0}, memoryview(record))
        while True:
            try:
                message = connection.receive(max(0.0, deadline - self._clock()))
            except SilentError as error:
                raise WorkerLostError(
                    f"not all workers came within {self._timeout:g} s: look at the output of the others"
                ) from error
            if "lengths" in message.header:
                break
        lengths = [int(each) for each in message.header["lengths"]]  # type: ignore[attr-defined]
        records = [bytearray(length) for length in lengths]
        connection.receive_payload(*(memoryview(each) for each in records))
        return [bytes(each) for each in records]

    def start(self, described: bytes, nbytes: Sequence[int]) -> None:
        """Take this worker's place at every shard; `described` is the run, `nbytes` the length of a message of each.

        Raises:
            ConfigError, DisagreementError: The servers cannot run this, or run something else.
        """
        self._described = described
        self._nbytes = tuple(nbytes)
        self._take_places()
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
        self._retrying(self._send)

    def collect(self) -> Header:
        """Wait for the answer to what was sent."""
        answer = self._retrying(self._collect)
        self._request = None
        if "error" in answer:
            raise _ERRORS.get(str(answer.get("kind")), ProtocolError)(str(answer["error"]))
        if answer.get("weights"):
            self.has = int(answer["version"])  # type: ignore[call-overload]
        return answer

    def fetch_states(self) -> dict[str, dict[str, object]]:
        """The optimizer's state by parameter, as the servers have it.

        Raises:
            WorkerLostError: The servers are gone.
        """
        states: dict[str, dict[str, object]] = {}
        for shard in self.shards:
            connection = self._line(shard)
            connection.send({"op": "states"})
            message = self._next(shard, lambda header: "states" in header or "error" in header, self._timeout)
            payload = bytearray(message.payload_bytes)
            connection.receive_payload(memoryview(payload))
            states |= decode_states(payload)
        return states

    def load_states(self, states: Sequence[Sequence[tuple[str, State]]]) -> None:
        """Have the optimizer go on from these states, shard by shard.

        Raises:
            ConfigError: They are none of this optimizer's.
            WorkerLostError: The servers are gone.
        """
        for shard, own in zip(self.shards, states, strict=True):
            self._line(shard).send({"op": "load_states"}, *encode_states(own))
            message = self._next(shard, lambda header: "loaded" in header or "error" in header, self._timeout)
            if "error" in message.header:
                raise _ERRORS.get(str(message.header.get("kind")), ProtocolError)(str(message.header["error"]))

    @property
    def asking(self) -> bool:
        """Whether an answer is still to be collected."""
        return self._request is not None

    def close(self) -> None:
        """Say goodbye, so that nobody takes this worker for dead."""
        self._closed.set()
        for shard in self.shards:
            if shard.connection is not None:
                with suppress(ConnectionLostError):
                    shard.connection.send({"op": "bye", "seq": self._sequence + 1})
            shard.close()

    # In between.

    def _retrying(self, attempt: Callable[[], Header]) -> Header:
        while True:
            try:
                return attempt()
            except ConnectionLostError as error:
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
            except ConnectionLostError as again:
                if self._clock() > deadline:
                    raise WorkerLostError(
                        f"the servers did not answer for {self._timeout:g} s ({again}): look at their output, then"
                        " start again"
                    ) from error
                self._wait(RETRY_SECONDS)
                continue
            break
        if self.incarnation != before:
            self._request = None
            raise ExpiredError("this worker was given up for dead, or the servers were started anew")
        self._send()

    def _take_places(self) -> None:
        before = self.incarnation
        for shard, nbytes in zip(self.shards, self._nbytes, strict=True):
            self._reach(shard)
            connection = self._line(shard)
            header = {"op": "start", "rank": self.rank, "incarnation": self.incarnation, "seq": 0, "has": self.has}
            connection.send(header, memoryview(self._described))
            message = self._next(shard, lambda header: "answer" in header, self._timeout)
            answer = message.header
            if "error" in answer:
                raise _ERRORS.get(str(answer.get("kind")), ProtocolError)(str(answer["error"]))
            if int(answer["nbytes"]) != nbytes:  # type: ignore[call-overload]
                raise ProtocolError(f"server {shard.index} has messages of {answer['nbytes']} bytes, not of {nbytes}")
            if shard.index == 0:
                self.incarnation = int(answer["incarnation"])  # type: ignore[call-overload]
                self._heartbeat = float(answer["heartbeat"])  # type: ignore[arg-type]
            if self.incarnation != before:
                shard.take_place(message, nbytes)
        if self.incarnation != before:
            self._sequence = 0
            self.has = -1

    def _send(self) -> Header:
        request = self._request
        assert request is not None
        if request.gradients:
            for shard in self.shards[1:]:
                self._send_to(shard, {"op": "stage", "seq": request.sequence})
            for shard in self.shards[1:]:
                self._next(shard, lambda header: header.get("staged") == request.sequence, None)
        self._send_to(self.shards[0], request.fields, payload=request.gradients)
        return {}

    def _send_to(self, shard: Shard, header: Header, *, payload: bool = True) -> None:
        travels: list[memoryview] = []
        if payload and shard.segment is None:
            travels = [memory_of(shard.gradients)] if shard.payload is None else shard.payload
        self._line(shard).send(header, *travels)

    def _collect(self) -> Header:
        request = self._request
        assert request is not None
        answer: Header = {}
        for shard in self.shards:
            if shard.index and not answer.get("weights"):
                break
            message = self._next(shard, lambda header: header.get("answer") == request.sequence, None)
            if message.payload_bytes:
                if message.payload_bytes != shard.weights.numel():
                    raise ConnectionLostError(f"server {shard.index} sent {message.payload_bytes} bytes of weights")
                self._line(shard).receive_payload(memory_of(shard.weights))
            answer = message.header if not shard.index else answer
        return answer

    def _next(self, shard: Shard, wanted: Callable[[Header], bool], limit: float | None) -> Message:
        """The next message of that kind; asks again for it after a while, and gives a silent server up."""
        connection = self._line(shard)
        heard = self._clock()
        while True:
            try:
                message = connection.receive(self._heartbeat * ASK_AGAIN)
            except SilentError as error:
                if self._clock() - heard > (limit or self._heartbeat):
                    raise ConnectionLostError(f"server {shard.index} is silent") from error
                if self._request is not None and limit is None:
                    connection.send({"op": "again", "seq": self._request.sequence})
                continue
            heard = self._clock()
            if wanted(message.header):
                return message
            sequence = -1 if self._request is None else self._request.sequence
            if "error" in message.header and message.header.get("answer") == sequence:
                raise _ERRORS.get(str(message.header.get("kind")), ProtocolError)(str(message.header["error"]))
            if "resend" in message.header and self._request is not None:
                self._send()

    def _reach(self, shard: Shard) -> None:
        if shard.connection is None:
            shard.connection = self._connect(shard.index)

    def _line(self, shard: Shard) -> Connection:
        if shard.connection is None:
            raise ConnectionLostError(f"the connection to server {shard.index} was closed")
        return shard.connection

    def _beat(self) -> None:
        main = threading.main_thread()
        while main.is_alive() and not self._closed.is_set():
            for shard in self.shards:
                connection = shard.connection
                if connection is not None:
                    try:
                        connection.send({"op": "ping"})
                    except ConnectionLostError:
                        continue  # Whoever waits on it finds out.
            # Joining the main thread is a sleep that ends early when the script does.
            main.join(self._heartbeat * ASK_AGAIN)
        # A script has no place where it would close what prepare opened. One that failed is not done, only gone.
        if not self._closed.is_set() and getattr(sys, "last_value", None) is None:
            self.close()
