"""Bytes over a stream socket, plain or encrypted; knows nothing of messages."""

import array
import math
import select
import socket
import ssl
import struct
import threading
from collections.abc import Sequence
from typing import Final, Protocol, final

from evenstep.transport.address import is_loopback
from evenstep.transport.codec import MAX_FILES
from evenstep.transport.files import close_files

_FILES_BYTES: Final = socket.CMSG_SPACE(MAX_FILES * array.array("i").itemsize)
_SOCKET_BUFFER_BYTES: Final = 2**22
_LOOPBACK_BUFFER_BYTES: Final = 2**18
_TLS_CHUNK_BYTES: Final = 2**18
_AHEAD_BYTES: Final = 2**12


class Wire(Protocol):
    """A stream of bytes. One thread at a time may read, one may write.

    Reading and writing raise BlockingIOError where the peer has moved nothing for as long as the wire is patient, and
    another OSError where it is gone.
    """

    local: bool

    def wait(self, timeout: float | None) -> bool:
        """Whether within so many seconds something has come that can be read, be it the end."""

    def read(self, buffer: memoryview) -> int:
        """Read at least one byte into the buffer, as many as there are; 0 at the end of the stream."""

    def read_with_files(self, buffer: memoryview) -> tuple[int, list[int]]:
        """As `read`, and take over the open files that come along."""

    def write(self, buffers: Sequence[memoryview], files: Sequence[int], *, wait: bool = True) -> int:
        """Write at least one byte of the buffers, one after another, and how many; files go with the first byte.

        With `wait` False the wire has no patience at all.
        """

    def set_reading_patience(self, seconds: float) -> None:
        """From the next read on, be patient for so long; writes are waited for as before."""

    def fileno(self) -> int:
        """The socket's descriptor, to wait on several of them at once."""

    def shut(self) -> None:
        """End the stream for both sides and wake whoever reads or writes; the descriptor stays."""

    def close(self) -> None:
        """Give the descriptor back; nobody may be reading or writing."""


@final
class SocketWire:
    """A plain socket: TCP, or a Unix socket, over which files can go.

    Over TCP small reads take what has come, so that the beginning of a message is one call. Not so on a Unix socket:
    files come with a byte, and whoever waits on the descriptor must not miss what has been read already.
    """

    def __init__(self, sock: socket.socket, *, patience_seconds: float) -> None:
        self.local = sock.family == socket.AF_UNIX
        self._socket = sock
        # The kernel keeps the time: a large read or write is then one call, with no poll before each part of it.
        sock.setblocking(True)
        self.set_reading_patience(patience_seconds)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(patience_seconds))
        _tune(sock)
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._store = memoryview(bytearray(0 if self.local else _AHEAD_BYTES))
        self._ahead = self._store[:0]

    def wait(self, timeout: float | None) -> bool:
        return bool(self._ahead) or bool(self._readable.poll(_milliseconds(timeout)))

    def read(self, buffer: memoryview) -> int:
        if not self._ahead:
            if len(buffer) >= len(self._store):
                return self._socket.recv_into(buffer, 0, socket.MSG_WAITALL)
            self._ahead = self._store[: self._socket.recv_into(self._store)]
        count = min(len(buffer), len(self._ahead))
        buffer[:count] = self._ahead[:count]
        self._ahead = self._ahead[count:]
        return count

    def read_with_files(self, buffer: memoryview) -> tuple[int, list[int]]:
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
            # The kernel has closed those that had no room; the message cannot be whole.
            close_files(files)
            raise OSError("it carried more files than a message can have")
        return count, files.tolist()

    def write(self, buffers: Sequence[memoryview], files: Sequence[int], *, wait: bool = True) -> int:
        flags = 0 if wait else socket.MSG_DONTWAIT
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
        return self._socket.sendmsg(buffers, ancillary, flags)

    def set_reading_patience(self, seconds: float) -> None:
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(seconds))

    def fileno(self) -> int:
        return self._socket.fileno()

    def shut(self) -> None:
        shut(self._socket)

    def close(self) -> None:
        self._socket.close()


@final
class TlsWire:
    """An encrypted socket. Its one TLS state is read and written under a lock, but waited for outside of it."""

    local = False

    def __init__(self, sock: ssl.SSLSocket, *, patience_seconds: float) -> None:
        self._socket = sock
        self._writing_patience = _milliseconds(patience_seconds)
        self.set_reading_patience(patience_seconds)
        self._state = threading.Lock()
        _tune(sock)
        sock.setblocking(False)
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._writable = select.poll()
        self._writable.register(sock, select.POLLOUT)

    def wait(self, timeout: float | None) -> bool:
        with self._state:
            if self._socket.pending():
                return True
        return bool(self._readable.poll(_milliseconds(timeout)))

    def read(self, buffer: memoryview) -> int:
        while True:
            try:
                with self._state:
                    return self._socket.recv_into(buffer)
            except ssl.SSLWantReadError:
                _await(self._readable, self._reading_patience)

    def read_with_files(self, buffer: memoryview) -> tuple[int, list[int]]:
        return self.read(buffer), []

    def write(self, buffers: Sequence[memoryview], files: Sequence[int], *, wait: bool = True) -> int:
        chunk = buffers[0][:_TLS_CHUNK_BYTES]
        while True:
            try:
                with self._state:
                    return self._socket.send(chunk)
            except ssl.SSLWantWriteError:
                # What was begun must be repeated with the same bytes.
                _await(self._writable, self._writing_patience if wait else 0)

    def set_reading_patience(self, seconds: float) -> None:
        self._reading_patience = _milliseconds(seconds)

    def fileno(self) -> int:
        return self._socket.fileno()

    def shut(self) -> None:
        shut(self._socket)

    def close(self) -> None:
        self._socket.close()


def wire_of(sock: socket.socket, patience_seconds: float) -> Wire:
    """The wire over a connected socket, which it takes over."""
    if isinstance(sock, ssl.SSLSocket):
        return TlsWire(sock, patience_seconds=patience_seconds)
    return SocketWire(sock, patience_seconds=patience_seconds)


def shut(sock: socket.socket) -> None:
    """End a socket's stream for both sides and wake whoever waits in it, also where it has ended already."""
    try:
        # Not `SSLSocket.shutdown`, which takes the encryption away under the reader, who would read on in the plain.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
    except OSError:
        return


def _tune(sock: socket.socket) -> None:
    """Send small messages at once; between hosts TCP sizes its own buffers, better than any fixed size."""
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if is_loopback(sock):
        # Within a host no bytes are on their way: larger buffers, which TCP would make, only fall out of the cache.
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _LOOPBACK_BUFFER_BYTES)


def _await(ready: select.poll, patience: int | None) -> None:
    if not ready.poll(patience):
        raise BlockingIOError("nothing moved")


def _milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else max(0, math.ceil(seconds * 1000))


def _timeval(seconds: float) -> bytes:
    """`struct timeval`; of at least a microsecond, since zero stands for ever."""
    microseconds = max(1, round(seconds * 1_000_000))
    return struct.pack("@ll", microseconds // 1_000_000, microseconds % 1_000_000)
