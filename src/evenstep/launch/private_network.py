"""A network that only the processes of a run see: a Linux namespace with nothing but loopback in it."""

import ctypes
import fcntl
import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from evenstep.core.errors import ConfigError

_NEW_NETWORK: Final = 0x40000000
_SET_FLAGS: Final = 0x8914
_UP: Final = 0x1


@contextmanager
def private_network() -> Iterator[None]:
    """Put this thread, and all that it starts, into a separate network while the context is open.

    Raises:
        ConfigError: The system has no such networks, or this process may not make one.
    """
    if sys.platform != "linux":
        raise ConfigError("--private-network needs network namespaces, which only Linux has: leave it out")
    system = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net", "rb") as before:
        if system.unshare(_NEW_NETWORK):
            raise ConfigError(
                f"--private-network cannot make a network namespace ({os.strerror(ctypes.get_errno())}): it needs root;"
                " start the run as root, or leave it out"
            )
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
                fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", b"lo", _UP))
            yield
        finally:
            system.setns(before.fileno(), _NEW_NETWORK)
