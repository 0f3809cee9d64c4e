"""Connections within one process: the promises of a socket, with a clock that tests control."""

import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, final

from evenstep.transport.base import Connection, ConnectionLostError, Message, SilentError
from evenstep.transport.codec import (
    DEFAULT_LIMITS,
    Limits,
    as_bytes,
    check_sendable,
    close_files,
    writable,
    wrong_room,
)
from support.clocks import Clock, SystemClock


def connected_pair(
    *, clock: Clock | None = None, limits: Limits = DEFAULT_LIMITS
) -> tuple["MemoryConnection", "MemoryConnection"]:
    """The two ends of a new connection; several connections may share one clock."""
    clock = clock or SystemClock()
    there, back = _Line(), _Line()
    one = MemoryConnection(outgoing=there, incoming=back, clock=clock, limits=limits)
    return one, MemoryConnection(outgoing=back, incoming=there, clock=clock, limits=limits)


@final
class MemoryConnection:
    """One end of a connection to the same process; `connected_pair` makes it.

    A message is copied when it is sent, as with a socket, but the queue has no limit.
    """

    local = True

    def __init__(self, *, outgoing: "_Line", incoming: "_Line", clock: Clock, limits: Limits) -> None:
        self._outgoing = outgoing
        self._incoming = incoming
        self._clock = clock
        self._limits = limits
        self._closed = False
        self._payload = b""

    def send(self, header: bytes, *payload: memoryview, files: Sequence[int] = (), wait: bool = True) -> None:
        check_sendable(header, files, self._limits)
        body = b"".join(as_bytes(buffer) for buffer in payload)
        with self._clock.changed:
            self._require_open()
            if self._outgoing.ended:
                raise ConnectionLostError("the peer has closed the connection")
            sent = _Sent(header=header, payload=body, files=tuple(map(os.dup, files)))
            self._outgoing.sent.append(sent)
            self._clock.changed.notify_all()

    def receive(self, timeout: float | None = None) -> Message:
        with self._clock.changed:
            self._require_open()
            self._payload = b""
            line = self._incoming
            if not self._clock.wait_for(lambda: bool(line.sent) or line.ended, timeout):
                raise SilentError(f"nothing arrived within {timeout} seconds")
            self._require_open()
            if not line.sent:
                raise ConnectionLostError("the peer has closed the connection")
            sent = line.sent.popleft()
        try:
            self._check(sent)
        except ConnectionLostError:
            close_files(sent.files)
            self.close()
            raise
        self._payload = sent.payload
        return Message(header=sent.header, payload_bytes=len(sent.payload), files=sent.files)

    def receive_payload(self, *buffers: memoryview) -> None:
        body = writable(buffers)
        self._require_open()
        room, unread = sum(map(len, body)), len(self._payload)
        if room != unread:
            raise wrong_room(room, unread)
        begin = 0
        for buffer in body:
            if buffer:
                buffer[:] = self._payload[begin : begin + len(buffer)]
            begin += len(buffer)
        self._payload = b""

    def close(self) -> None:
        with self._clock.changed:
            self._closed = True
            self._outgoing.ended = self._incoming.ended = True
            while self._incoming.sent:
                close_files(self._incoming.sent.popleft().files)
            self._clock.changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._closed:
            raise ConnectionLostError("the connection was closed")

    def _check(self, sent: "_Sent") -> None:
        """The limits of the sender may differ from those of the receiver."""
        if len(sent.header) > self._limits.header_bytes or len(sent.payload) > self._limits.payload_bytes:
            raise ConnectionLostError(
                f"a message of {len(sent.header)} bytes of header and {len(sent.payload)} of payload: it must have at"
                f" most {self._limits.header_bytes} and {self._limits.payload_bytes}"
            )


@final
class MemoryListener:
    """Like `StreamListener`, for peers of the same process, which connect with `connect`."""

    addresses = ("memory:",)

    def __init__(self, *, clock: Clock | None = None, limits: Limits = DEFAULT_LIMITS) -> None:
        self._clock = clock or SystemClock()
        self._limits = limits
        self._waiting: deque[Connection] = deque()
        self._closed = False

    def connect(self) -> Connection:
        """A new connection, whose other end `accept` returns; ConnectionLostError if the listener was closed."""
        with self._clock.changed:
            self._require_open()
            one, other = connected_pair(clock=self._clock, limits=self._limits)
            self._waiting.append(other)
            self._clock.changed.notify_all()
            return one

    def accept(self) -> Connection:
        with self._clock.changed:
            self._clock.wait_for(lambda: bool(self._waiting) or self._closed, None)
            self._require_open()
            return self._waiting.popleft()

    def close(self) -> None:
        with self._clock.changed:
            self._closed = True
            unmet = list(self._waiting)
            self._waiting.clear()
            self._clock.changed.notify_all()
        for connection in unmet:
            connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._closed:
            raise ConnectionLostError("the listener was closed")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Sent:
    """A message in flight."""

    header: bytes
    payload: bytes
    files: tuple[int, ...]


@final
class _Line:
    """One direction of a connection: the messages in flight, and whether more can follow."""

    def __init__(self) -> None:
        self.sent: deque[_Sent] = deque()
        self.ended = False
