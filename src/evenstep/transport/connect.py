"""Connects to a listener by the first of its addresses that works."""

import socket
from collections.abc import Sequence
from typing import Final

from evenstep.core.errors import ConfigError
from evenstep.transport.address import Address, is_loopback
from evenstep.transport.base import Connection, ConnectionLostError
from evenstep.transport.certificate import client_context
from evenstep.transport.codec import DEFAULT_LIMITS, Limits
from evenstep.transport.secure import Deadline, introduce, require_secret
from evenstep.transport.stream import StreamConnection
from evenstep.transport.wire import wire_of

_CONNECT_SECONDS: Final = 10.0


def connect(
    addresses: Sequence[str], *, secret: bytes, timeout: float = _CONNECT_SECONDS, limits: Limits = DEFAULT_LIMITS
) -> Connection:
    """Connect to the listener with these addresses, within `timeout` seconds. The first address that works is used.

    The address of a Unix socket works only on the listener's host and in its network namespace.

    Raises:
        ConfigError: An address is invalid, or the secret is too short.
        ConnectionLostError: No address works; the message names the reason for each.
    """
    require_secret(secret)
    parsed = [Address.parse(address) for address in addresses]
    deadline = Deadline(timeout)
    failures: list[str] = []
    for tried, address in enumerate(parsed):
        try:
            share = Deadline(deadline.left() / (len(parsed) - tried))
            sock = _introduced(address, secret, share)
            return StreamConnection(wire_of(sock, limits.patience_seconds), limits=limits)
        except OSError as error:
            failures.append(f"{address}: {error.strerror or error}")
    raise ConnectionLostError(f"no connection to the server ({'; '.join(failures) or 'it has no addresses'})")


def _introduced(address: Address, secret: bytes, deadline: Deadline) -> socket.socket:
    """Return a socket whose peer has proved that it knows the secret."""
    sock = _reach(address, deadline)
    try:
        certificate = b""
        if address.scheme == "tls":
            sock = client_context().wrap_socket(sock)
            certificate = sock.getpeercert(binary_form=True) or b""
        elif address.scheme == "tcp" and not is_loopback(sock):
            raise ConfigError(f"{address} would not be encrypted on the network: use the server's tls:// address")
        introduce(sock, secret=secret, certificate=certificate, deadline=deadline)
    except BaseException:
        sock.close()
        raise
    return sock


def _reach(address: Address, deadline: Deadline) -> socket.socket:
    """Return a connected socket."""
    if address.scheme != "unix":
        sock = socket.create_connection((address.name, address.port), deadline.left())
    else:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(deadline.left())
            sock.connect(address.abstract)
        except BaseException:
            sock.close()
            raise
    sock.settimeout(deadline.left())
    return sock
