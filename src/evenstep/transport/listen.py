"""Accepts connections: on this host by a Unix socket, from other hosts by encrypted TCP.

Each peer proves in a separate thread that it knows the secret, so no peer can delay another. The number of these
threads is limited. If more peers connect at once, the one that has taken longest is dropped.
"""

import hmac
import ipaddress
import socket
import ssl
import sys
import threading
from collections import deque
from typing import Final, Literal, Self, final

from evenstep.core.errors import ConfigError
from evenstep.transport.address import Address, is_loopback
from evenstep.transport.base import Connection, ConnectionLostError
from evenstep.transport.certificate import Certificate
from evenstep.transport.codec import DEFAULT_LIMITS, Limits
from evenstep.transport.secure import Deadline, admit, require_secret
from evenstep.transport.stream import StreamConnection
from evenstep.transport.wire import shut, wire_of

_BACKLOG: Final = 1024
_PENDING: Final = 64
_PAUSE_SECONDS: Final = 0.1
_ADMIT_SECONDS: Final = 5.0


def listen(
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    secret: bytes,
    local: bool = True,
    limits: Limits = DEFAULT_LIMITS,
    admit_seconds: float = _ADMIT_SECONDS,
) -> "StreamListener":
    """Listen for peers that know the secret.

    Args:
        host: The host name or IP address by which the peers reach this host. Beyond loopback everything is encrypted.
        port: 0 lets the system choose a port.
        secret: At least 16 random bytes.
        local: Also listen on an abstract Unix socket, if the system has them.
        limits: The limits of what connections accept.
        admit_seconds: How long a peer may take to prove that it knows the secret.

    Raises:
        ConfigError: The secret is too short, this host has no such address, no peer could connect to it, the port is
            in use, or `cryptography` is not installed.
    """
    require_secret(secret)
    door, address = _tcp_door(host, port)
    doors = {door: address}
    try:
        certificate = Certificate.create() if address.scheme == "tls" else None
        if local and sys.platform == "linux":
            door, address = _unix_door(_name(secret, address.port))
            doors = {door: address, **doors}
        return StreamListener(doors, secret=secret, certificate=certificate, limits=limits, admit_seconds=admit_seconds)
    except BaseException:
        for door in doors:
            door.close()
        raise


@final
class StreamListener:
    """Accepts connections, made by `listen`. `addresses`: where it can be reached, best first."""

    def __init__(
        self,
        doors: dict[socket.socket, Address],
        *,
        secret: bytes,
        certificate: Certificate | None,
        limits: Limits,
        admit_seconds: float,
    ) -> None:
        self.addresses = tuple(str(address) for address in doors.values())
        self._secret = secret
        self._certificate = certificate
        self._limits = limits
        self._admit_seconds = admit_seconds
        self._changed = threading.Condition()
        self._closed = False
        self._admitted: deque[Connection] = deque()
        self._pending: dict[socket.socket, threading.Thread] = {}
        self._doors = doors
        self._threads = [
            threading.Thread(target=self._keep, args=(door, address), name=f"evenstep {address}", daemon=True)
            for door, address in doors.items()
        ]
        for thread in self._threads:
            thread.start()

    def accept(self) -> Connection:
        """Return the next peer that has proved that it knows the secret.

        Raises:
            ConnectionLostError: The listener was closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._admitted or self._closed)
            if self._closed:
                raise ConnectionLostError("the listener was closed")
            return self._admitted.popleft()

    def close(self) -> None:
        """Accept no more peers, and wake threads that wait in `accept`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            pending = dict(self._pending)
            for sock in [*self._doors, *pending]:
                shut(sock)
        for thread in [*self._threads, *pending.values()]:
            thread.join()
        for door in self._doors:
            door.close()
        while self._admitted:
            self._admitted.popleft().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _keep(self, door: socket.socket, address: Address) -> None:
        """Accept peers on one socket, until the listener is closed."""
        while not self._closed:
            try:
                sock, _ = door.accept()
            except OSError:
                # Closed; or the peer has given up; or this process has no descriptors left, which may change.
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, _PAUSE_SECONDS)
                continue
            self._begin(sock, address)

    def _begin(self, sock: socket.socket, address: Address) -> None:
        """Start a thread in which the peer proves that it knows the secret."""
        try:
            if address.scheme == "tls":
                assert self._certificate is not None
                sock = self._certificate.context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        except OSError:  # The peer is gone already.
            sock.close()
            return
        thread = threading.Thread(target=self._admit, args=(sock,), name="evenstep admits", daemon=True)
        with self._changed:
            if len(self._pending) >= _PENDING:
                shut(next(iter(self._pending)))
                self._changed.wait_for(lambda: self._closed or len(self._pending) < _PENDING)
            if self._closed:
                sock.close()
                return
            self._pending[sock] = thread
            try:
                thread.start()
            except RuntimeError:  # The system has no thread left; the peer may try again.
                del self._pending[sock]
                sock.close()

    def _admit(self, sock: socket.socket) -> None:
        try:
            connection = self._proven(sock)
        except (OSError, ValueError):  # Reject the peer, whatever it sent.
            connection = None
        with self._changed:
            del self._pending[sock]
            if connection is None or self._closed:
                sock.close()
            else:
                self._admitted.append(connection)
            self._changed.notify_all()

    def _proven(self, sock: socket.socket) -> Connection:
        deadline = Deadline(self._admit_seconds)
        certificate = b""
        if isinstance(sock, ssl.SSLSocket):
            assert self._certificate is not None
            certificate = self._certificate.der
            sock.settimeout(deadline.left())
            sock.do_handshake()
        admit(sock, secret=self._secret, certificate=certificate, deadline=deadline)
        return StreamConnection(wire_of(sock, self._limits.patience_seconds), limits=self._limits)


def _tcp_door(host: str, port: int) -> tuple[socket.socket, Address]:
    try:
        family, _, _, _, (number, *_) = socket.getaddrinfo(host or "::", port, type=socket.SOCK_STREAM)[0]
        if ipaddress.ip_address(number).is_unspecified:
            raise ConfigError(
                f"peers cannot connect to {host!r}: listen on the host name or address by which they reach this host"
            )
        door = socket.create_server((str(number), port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"this host cannot listen on {host!r} ({error.strerror}): give its own host name or address"
        ) from error
    scheme: Literal["tcp", "tls"] = "tcp" if is_loopback(door) else "tls"
    return door, Address(scheme=scheme, name=host, port=door.getsockname()[1])


def _name(secret: bytes, port: int) -> str:
    """Return the name of a Unix socket: other users cannot guess it, and a later listener on the port has the same."""
    return f"evenstep-{hmac.digest(secret, f'unix socket beside port {port}'.encode(), 'sha256')[:8].hex()}"


def _unix_door(name: str) -> tuple[socket.socket, Address]:
    """Make an abstract Unix socket of this name."""
    address = Address(scheme="unix", name=name)
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        door.bind(address.abstract)
        door.listen(_BACKLOG)
    except BaseException:
        door.close()
        raise
    return door, address
