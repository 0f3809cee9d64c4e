"""Messages over a stream of bytes. Payloads are sent from, and received into, the caller's memory."""

import threading
from collections.abc import Sequence
from typing import Final, NoReturn, Self, final

from evenstep.transport.base import ConnectionLostError, Message, SilentError
from evenstep.transport.codec import (
    DEFAULT_LIMITS,
    PREFIX_BYTES,
    Limits,
    Prefix,
    as_bytes,
    check_sendable,
    close_files,
    writable,
    wrong_room,
)
from evenstep.transport.wire import Wire

_MAX_BUFFERS: Final = 1024
_SCRATCH_BYTES: Final = 2**16
_TURN_SECONDS: Final = 1.0
"""How long a send with `wait` False waits for another thread's message, which may itself wait for the peer."""


@final
class StreamConnection:
    """A `Connection` over a stream socket.

    An error in the middle of a message ends the connection, since the start of the next message is unknown. After a
    failed send the descriptor stays open until the receiver has seen the end, since it may be waiting in a selector.
    """

    def __init__(self, wire: Wire, *, limits: Limits = DEFAULT_LIMITS) -> None:
        self.local = wire.local
        self._wire = wire
        self._limits = limits
        # Reentrant, so that a signal handler may close a connection that the interrupted thread uses.
        self._sending = threading.RLock()
        self._receiving = threading.RLock()
        self._closed = False
        self._broken = False
        """True if a send has failed. Nothing more is sent, but earlier messages are still received."""
        self._unread = 0
        self._prefix = memoryview(bytearray(PREFIX_BYTES))

    def send(self, header: bytes, *payload: memoryview, files: Sequence[int] = (), wait: bool = True) -> None:
        if files and not self.local:
            raise ValueError("files can be sent on one host only: check `local` first")
        check_sendable(header, files, self._limits)
        body = [as_bytes(buffer) for buffer in payload]
        prefix = Prefix(header_bytes=len(header), payload_bytes=sum(map(len, body)), files=len(files))
        buffers = [memoryview(prefix.encode() + header), *filter(len, body)]
        try:
            if not self._sending.acquire(timeout=-1 if wait else _TURN_SECONDS):
                raise BlockingIOError("another message is on its way")
            try:
                self._require_open(sending=True)
                self._write(buffers, files, wait)
            finally:
                self._sending.release()
        except BaseException as error:
            ended = self._closed or self._broken
            # The receiver closes the descriptor once it has seen the end.
            self._broken = True
            self._wire.shut()
            self._raise(error, "took in nothing more of a message", ended=ended)

    def receive(self, timeout: float | None = None) -> Message:
        try:
            with self._receiving:
                self._require_open()
                self._skip_payload()
                begun = self._await_message(timeout)
                if begun is not None:
                    return self._read_message(*begun)
        except BaseException as error:
            self._end(error, "fell silent in the middle of a message")
        raise SilentError(f"nothing arrived within {timeout} seconds")

    def receive_payload(self, *buffers: memoryview) -> None:
        body = writable(buffers)
        try:
            with self._receiving:
                self._require_open()
                room = sum(map(len, body))
                if room == self._unread:
                    for buffer in body:
                        self._fill(buffer)
                    self._unread = 0
                    return
                unread = self._unread
        except BaseException as error:
            self._end(error, "fell silent in the middle of a message")
        raise wrong_room(room, unread)

    def set_reading_patience(self, seconds: float) -> None:
        """Set how long the peer may pause in the middle of a message, in place of the limits' value."""
        self._wire.set_reading_patience(seconds)

    def fileno(self) -> int:
        """Return the socket's descriptor. On one host, it is readable if a message has begun."""
        return self._wire.fileno()

    def close(self) -> None:
        self._closed = True
        self._wire.shut()
        # Woken threads leave first: the descriptor must not be reused while they use it.
        with self._receiving, self._sending:
            self._wire.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_open(self, *, sending: bool = False) -> None:
        if self._closed or (sending and self._broken):
            raise ConnectionLostError("the connection was closed")

    def _end(self, error: BaseException, when_silent: str) -> NoReturn:
        """Close, and raise the reason."""
        ended = self._closed
        self.close()
        self._raise(error, when_silent, ended=ended)

    @staticmethod
    def _raise(error: BaseException, when_silent: str, *, ended: bool) -> NoReturn:
        """Raise the reason. `ended`: the connection had already ended."""
        if not isinstance(error, OSError):
            raise error
        if ended:
            raise ConnectionLostError("the connection was closed") from error
        if isinstance(error, ConnectionLostError):
            raise error
        if isinstance(error, BlockingIOError):
            raise ConnectionLostError(f"the peer {when_silent}") from error
        raise ConnectionLostError(f"the connection to the peer was lost: {error.strerror or error}") from error

    def _write(self, buffers: list[memoryview], files: Sequence[int], wait: bool) -> None:
        left = sum(map(len, buffers))
        while left:
            written = self._wire.write(buffers[:_MAX_BUFFERS], files, wait=wait)
            files = ()
            left -= written
            if left:
                _advance(buffers, written)

    def _await_message(self, timeout: float | None) -> tuple[int, list[int]] | None:
        """Return the first bytes of the next prefix, and the files; None if nothing arrived in time."""
        if timeout is not None and not self._wire.wait(timeout):
            return None
        while True:
            try:
                return self._wire.read_with_files(self._prefix)
            except BlockingIOError:
                if timeout is not None:
                    raise
                # Between messages a peer may be silent for longer.

    def _read_message(self, count: int, files: list[int]) -> Message:
        try:
            if not count:
                raise ConnectionLostError("the peer has closed the connection")
            if count < PREFIX_BYTES:
                self._fill(self._prefix[count:])
            prefix = Prefix.decode(self._prefix, self._limits)
            if prefix.files != len(files):
                raise ConnectionLostError(f"a message announced {prefix.files} files but came with {len(files)}")
            header = bytearray(prefix.header_bytes)
            self._fill(memoryview(header))
        except BaseException:
            close_files(files)
            raise
        self._unread = prefix.payload_bytes
        return Message(header=bytes(header), payload_bytes=prefix.payload_bytes, files=tuple(files))

    def _fill(self, buffer: memoryview) -> None:
        while buffer:
            count = self._wire.read(buffer)
            if not count:
                raise ConnectionLostError("the peer was gone in the middle of a message")
            buffer = buffer[count:]

    def _skip_payload(self) -> None:
        if not self._unread:
            return
        scratch = memoryview(bytearray(min(self._unread, _SCRATCH_BYTES)))
        while self._unread:
            part = scratch[: self._unread]
            self._fill(part)
            self._unread -= len(part)


def _advance(buffers: list[memoryview], written: int) -> None:
    """Drop the first `written` bytes."""
    whole = 0
    while whole < len(buffers) and written >= len(buffers[whole]):
        written -= len(buffers[whole])
        whole += 1
    del buffers[:whole]
    if written:
        buffers[0] = buffers[0][written:]
