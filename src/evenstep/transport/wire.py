"""Reads and writes bytes on a stream socket, plain or encrypted."""

import array
import math
import select
import socket
import ssl
import struct
import threading
from collections.abc import Sequence
from typing import Final, final

from evenstep.transport.address import is_loopback
from evenstep.transport.codec import MAX_FILES, close_files

_FILES_BYTES: Final = socket.CMSG_SPACE(MAX_FILES * array.array("i").itemsize)
_SOCKET_BUFFER_BYTES: Final = 2**22
_LOOPBACK_BUFFER_BYTES: Final = 2**18
_TLS_CHUNK_BYTES: Final = 2**18


class Wire:
    """A stream of bytes on a plain socket: TCP, or a Unix socket, which can carry files.

    One thread at a time may read, and one may write. Reading and writing raise BlockingIOError if no byte moved for as
    long as the patience lasts, and another OSError if the peer is gone.
    """

    def __init__(self, sock: socket.socket, *, patience_seconds: float) -> None:
        self.local = sock.family == socket.AF_UNIX
        self._socket = sock
        _tune(sock)
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._be_patient(patience_seconds)
        self.set_reading_patience(patience_seconds)

    def _be_patient(self, seconds: float) -> None:
        """Set the patience of writes."""
        # The kernel measures the time, so a large read or write is one call, without polls in between.
        self._socket.setblocking(True)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(seconds))

    def set_reading_patience(self, seconds: float) -> None:
        """Set the patience of reads, but not of writes."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(seconds))

    def wait(self, timeout: float | None) -> bool:
        """Wait until bytes, or the end, can be read; False if there are none after `timeout` seconds."""
        return bool(self._readable.poll(_milliseconds(timeout)))

    def read(self, buffer: memoryview) -> int:
        """Read at least one byte into the buffer, and return the number of bytes; 0 at the end of the stream."""
        return self._socket.recv_into(buffer, 0, socket.MSG_WAITALL)

    def read_with_files(self, buffer: memoryview) -> tuple[int, list[int]]:
        """Like `read`, and also returns received file descriptors."""
        if not self.local:
            return self.read(buffer), []
        count, ancillary, flags, _ = self._socket.recvmsg_into([buffer], _FILES_BYTES, socket.MSG_CMSG_CLOEXEC)
        if not ancillary:
            return count, []
        files = array.array("i")
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                files.frombytes(content[: len(content) - len(content) % files.itemsize])
        if flags & socket.MSG_CTRUNC:
            # The kernel has closed the files that had no room, so the message is incomplete.
            close_files(files)
            raise OSError("the peer sent more files than a message can have")
        return count, files.tolist()

    def write(self, buffers: Sequence[memoryview], files: Sequence[int], *, wait: bool = True) -> int:
        """Write at least one byte of the buffers, in order; return the number of bytes. Files go with the first byte.

        With `wait` False, the patience is zero.
        """
        flags = 0 if wait else socket.MSG_DONTWAIT
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
        return self._socket.sendmsg(buffers, ancillary, flags)

    def fileno(self) -> int:
        """Return the socket's descriptor, for a selector."""
        return self._socket.fileno()

    def shut(self) -> None:
        """End the stream for both peers and wake threads that read or write. The descriptor stays open."""
        shut(self._socket)

    def close(self) -> None:
        """Close the descriptor; no thread may be reading or writing."""
        self._socket.close()


@final
class TlsWire(Wire):
    """An encrypted socket. Its TLS state is used under a lock; waiting is done outside of the lock."""

    _socket: ssl.SSLSocket

    def __init__(self, sock: ssl.SSLSocket, *, patience_seconds: float) -> None:
        super().__init__(sock, patience_seconds=patience_seconds)
        self._state = threading.Lock()
        self._writable = select.poll()
        self._writable.register(sock, select.POLLOUT)

    def _be_patient(self, seconds: float) -> None:
        self._socket.setblocking(False)
        self._writing_patience = _milliseconds(seconds)

    def set_reading_patience(self, seconds: float) -> None:
        self._reading_patience = _milliseconds(seconds)

    def wait(self, timeout: float | None) -> bool:
        with self._state:
            if self._socket.pending():
                return True
        return super().wait(timeout)

    def read(self, buffer: memoryview) -> int:
        while True:
            try:
                with self._state:
                    return self._socket.recv_into(buffer)
            except ssl.SSLWantReadError:
                _await(self._readable, self._reading_patience)

    def write(self, buffers: Sequence[memoryview], files: Sequence[int], *, wait: bool = True) -> int:
        chunk = buffers[0][:_TLS_CHUNK_BYTES]
        while True:
            try:
                with self._state:
                    return self._socket.send(chunk)
            except ssl.SSLWantWriteError:
                # TLS requires that a write is repeated with the same bytes.
                _await(self._writable, self._writing_patience if wait else 0)


def wire_of(sock: socket.socket, patience_seconds: float) -> Wire:
    """Return the wire over a connected socket, which it then owns."""
    if isinstance(sock, ssl.SSLSocket):
        return TlsWire(sock, patience_seconds=patience_seconds)
    return Wire(sock, patience_seconds=patience_seconds)


def shut(sock: socket.socket) -> None:
    """End a socket's stream for both peers and wake threads that wait in it. Calling this twice is harmless."""
    try:
        # Not `SSLSocket.shutdown`, which removes the encryption while another thread still reads.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
    except OSError:
        return


def _tune(sock: socket.socket) -> None:
    """Send small messages at once. Between hosts TCP sizes its buffers better than any fixed size."""
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if is_loopback(sock):
        # Within a host there is no latency, so the larger buffers that TCP would use only exceed the cache.
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _LOOPBACK_BUFFER_BYTES)


def _await(ready: select.poll, patience: int | None) -> None:
    if not ready.poll(patience):
        raise BlockingIOError("nothing moved")


def _milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else max(0, math.ceil(seconds * 1000))


def _timeval(seconds: float) -> bytes:
    """Return a `struct timeval` of at least a microsecond, since zero means for ever."""
    microseconds = max(1, round(seconds * 1_000_000))
    return struct.pack("@ll", microseconds // 1_000_000, microseconds % 1_000_000)
