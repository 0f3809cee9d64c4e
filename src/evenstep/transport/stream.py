"""Messages over a stream of bytes: one frame each, payloads straight from and into the caller's memory."""

import threading
from collections.abc import Sequence
from typing import Final, NoReturn, Self, final

from evenstep.transport.base import ConnectionLostError, Header, Message, SilentError
from evenstep.transport.codec import (
    DEFAULT_LIMITS,
    PREFIX_BYTES,
    Limits,
    Prefix,
    as_bytes,
    decode_header,
    encode_header,
    require_few,
    writable,
    wrong_room,
)
from evenstep.transport.files import close_files
from evenstep.transport.wire import Wire

_MAX_BUFFERS: Final = 1024
_SCRATCH_BYTES: Final = 2**16


@final
class StreamConnection:
    """A `Connection` over a stream socket.

    Whatever goes wrong in the middle of a message ends it, since nobody could tell where the next one begins. A send
    waits until the peer's system has taken the message in: of two peers, at least one must receive. A send that fails
    leaves the descriptor open until the receiver has seen the end, as it may be waiting on it in a selector.
    """

    def __init__(self, wire: Wire, *, limits: Limits = DEFAULT_LIMITS) -> None:
        self.local = wire.local
        self._wire = wire
        self._limits = limits
        # Reentrant, so that a signal handler may close what the interrupted thread is in.
        self._sending = threading.RLock()
        self._receiving = threading.RLock()
        self._closed = False
        self._broken = False
        """Whether a send has failed: nothing more is sent, and what had come before is still received."""
        self._unread = 0
        self._prefix = memoryview(bytearray(PREFIX_BYTES))
        self._header = memoryview(bytearray(min(limits.header_bytes, _SCRATCH_BYTES)))

    def send(self, header: Header, *payload: memoryview, files: Sequence[int] = (), wait: bool = True) -> None:
        if files and not self.local:
            raise ValueError("files can be sent on one host only: look at `local` first")
        require_few(files)
        body = [as_bytes(buffer) for buffer in payload]
        encoded = encode_header(header, self._limits)
        prefix = Prefix(header_bytes=len(encoded), payload_bytes=sum(map(len, body)), files=len(files))
        buffers = [memoryview(prefix.encode() + encoded), *(buffer for buffer in body if buffer)]
        try:
            if not self._sending.acquire(blocking=wait):
                raise BlockingIOError("another message is on its way")
            try:
                self._require_open(sending=True)
                self._write(buffers, files, wait)
            finally:
                self._sending.release()
        except BaseException as error:
            ended = self._closed or self._broken
            # The receiver closes the descriptor: it may be waiting on it, and must see the end.
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
        """How long the peer may stand still in the middle of a message of its own, instead of what the limits said."""
        self._wire.set_reading_patience(seconds)

    def fileno(self) -> int:
        """The socket's descriptor: on one host, readable when `receive` will not wait for a message to begin."""
        return self._wire.fileno()

    def close(self) -> None:
        self._closed = True
        self._wire.shut()
        # Those that are woken leave first: the descriptor must not be given to another file while they use it.
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
        """Close, and say why nothing more can be received."""
        ended = self._closed
        self.close()
        self._raise(error, when_silent, ended=ended)

    @staticmethod
    def _raise(error: BaseException, when_silent: str, *, ended: bool) -> NoReturn:
        """Say why; `ended` tells that the connection had ended before."""
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
        while buffers:
            written = self._wire.write(buffers[:_MAX_BUFFERS], files, wait=wait)
            files = ()
            whole = 0
            while whole < len(buffers) and written >= len(buffers[whole]):
                written -= len(buffers[whole])
                whole += 1
            del buffers[:whole]
            if written:
                buffers[0] = buffers[0][written:]

    def _await_message(self, timeout: float | None) -> tuple[int, list[int]] | None:
        """How much of the next prefix has been read, and the files that came along; None where nothing came in time."""
        if timeout is not None and not self._wire.wait(timeout):
            return None
        while True:
            try:
                return self._wire.read_with_files(self._prefix)
            except BlockingIOError:
                if timeout is not None:
                    raise
                # Between messages a peer may be silent for longer than in one.

    def _read_message(self, count: int, files: list[int]) -> Message:
        try:
            if not count:
                raise ConnectionLostError("the peer has closed the connection")
            self._fill(self._prefix[count:])
            prefix = Prefix.decode(self._prefix, self._limits)
            if prefix.files != len(files):
                raise ConnectionLostError(f"a message that announces {prefix.files} files came with {len(files)}")
            header = self._read_header(prefix.header_bytes)
        except BaseException:
            close_files(files)
            raise
        self._unread = prefix.payload_bytes
        return Message(header=header, payload_bytes=prefix.payload_bytes, files=tuple(files))

    def _read_header(self, header_bytes: int) -> Header:
        if header_bytes > len(self._header):
            self._header = memoryview(bytearray(header_bytes))
        encoded = self._header[:header_bytes]
        self._fill(encoded)
        return decode_header(encoded)

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
