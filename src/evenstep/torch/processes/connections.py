"""This process's TCP connections, where the system lists them, and how to end some of them."""

import os
import socket
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def connections(port: int | None = None, *, served: bool = False) -> dict[int, int]:
    """Return the inodes and descriptors of all connections, or of those to this port, and `served`: those from it."""
    found = dict[int, int]()
    with suppress(OSError):
        for each in Path("/proc/self/fd").iterdir():
            with suppress(OSError), _socket(int(each.name)) as sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6) and port in (
                    None,
                    sock.getpeername()[1],
                    sock.getsockname()[1] if served else None,
                ):
                    found[os.fstat(sock.fileno()).st_ino] = int(each.name)
    return found


def cut(inodes: Collection[int]) -> None:
    """Shut down those connections, so that calls which wait for them fail. The descriptors stay open."""
    for inode, number in connections().items():
        if inode in inodes:
            with suppress(OSError), _socket(number) as sock:
                sock.shutdown(socket.SHUT_RDWR)


def is_closed(descriptor: int) -> bool:
    """True if the other end has closed this connection, on which nothing is to be read now."""
    try:
        with _socket(descriptor) as sock:
            return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


@contextmanager
def _socket(number: int) -> Iterator[socket.socket]:
    """Yield the socket of a descriptor, which stays open; OSError if it is not a socket's."""
    sock = socket.socket(fileno=number)
    try:
        yield sock
    finally:
        sock.detach()
