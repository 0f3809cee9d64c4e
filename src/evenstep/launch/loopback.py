"""A rendezvous store that only processes of this host can reach; PyTorch's own listen on every address."""

import socket
from typing import Final

from evenstep.launch.c10d import TCPStore

LOOPBACK: Final = "127.0.0.1"


def loopback_store() -> TCPStore:
    """A new store that listens on loopback alone."""
    listening = socket.create_server((LOOPBACK, 0))
    port = listening.getsockname()[1]
    return TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def loopback_listener(host: str, port: int) -> int | None:
    """The descriptor of a socket for a store that is to be found there, listening on loopback alone.

    None where the host is not this one's loopback, or the port is taken: by another store of this process, which
    PyTorch then shares, or by another process, which PyTorch then says.
    """
    try:
        number = socket.gethostbyname(host)
        return socket.create_server((number, port)).detach() if number.startswith("127.") else None
    except OSError:
        return None
