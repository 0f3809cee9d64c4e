"""The handshake: before any message, both peers prove that they know the secret, without sending it.

(1) server: magic, version, nonce. (2) client: nonce, proof. (3) server: proof. A proof is an HMAC-SHA256, keyed with
the secret, of the peer's role, the version, both nonces and, if the connection is encrypted, the server's certificate.
So a man in the middle, who has another certificate, fails. The client proves first, so a stranger learns nothing from a
server. All sizes are fixed, so a stranger cannot make a server reserve memory.
"""

import hashlib
import hmac
import secrets
import socket
import struct
import time
from dataclasses import dataclass
from typing import Final, Literal, final

from evenstep.core.errors import ConfigError
from evenstep.transport.base import ConnectionLostError
from evenstep.transport.codec import VERSION

MIN_SECRET_BYTES: Final = 16

_MAGIC: Final = b"evenstep"
_NONCE_BYTES: Final = 32
_PROOF_BYTES: Final = hashlib.sha256().digest_size
_GREETING: Final = struct.Struct(f"!8sH{_NONCE_BYTES}s")


@final
class Deadline:
    """A point in time, `seconds` from its creation."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Return the seconds until then; TimeoutError if it has passed."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        return left


def require_secret(secret: bytes) -> None:
    """Raise ConfigError if the secret is too short."""
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"a secret of {len(secret)} bytes could be guessed: use at least {MIN_SECRET_BYTES} random ones, such as"
            " secrets.token_bytes(32)"
        )


def admit(sock: socket.socket, *, secret: bytes, certificate: bytes, deadline: Deadline) -> None:
    """Do the server's side of the handshake.

    Raises:
        ConnectionLostError: The client does not know the secret.
        OSError: The client is gone, or did not answer by the deadline.
    """
    ours = secrets.token_bytes(_NONCE_BYTES)
    _send(sock, _GREETING.pack(_MAGIC, VERSION, ours), deadline)
    answer = _receive(sock, _NONCE_BYTES + _PROOF_BYTES, deadline)
    exchange = _Exchange(secret=secret, server=ours, client=answer[:_NONCE_BYTES], certificate=certificate)
    if not hmac.compare_digest(answer[_NONCE_BYTES:], exchange.proof("client")):
        raise ConnectionLostError("the peer does not know the secret")
    _send(sock, exchange.proof("server"), deadline)


def introduce(sock: socket.socket, *, secret: bytes, certificate: bytes, deadline: Deadline) -> None:
    """Do the client's side of the handshake.

    Raises:
        ConnectionLostError: The peer is not a server of this version, refuses, or does not know the secret.
        OSError: The server is gone, or did not answer by the deadline.
    """
    magic, version, theirs = _GREETING.unpack(_receive(sock, _GREETING.size, deadline))
    if magic != _MAGIC:
        raise ConnectionLostError("the peer is not an evenstep server")
    if version != VERSION:
        raise ConnectionLostError(
            f"the server speaks version {version} of the protocol, this side {VERSION}: install the same evenstep"
        )
    ours = secrets.token_bytes(_NONCE_BYTES)
    exchange = _Exchange(secret=secret, server=theirs, client=ours, certificate=certificate)
    _send(sock, ours + exchange.proof("client"), deadline)
    try:
        proof = _receive(sock, _PROOF_BYTES, deadline)
    except ConnectionError as error:
        raise ConnectionLostError("the server refused: give both sides the same secret") from error
    if not hmac.compare_digest(proof, exchange.proof("server")):
        raise ConnectionLostError("the server does not know the secret: give both sides the same")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Exchange:
    """The data that both proofs cover: the nonces of server and client, and the server's certificate, empty if none."""

    secret: bytes
    server: bytes
    client: bytes
    certificate: bytes

    def proof(self, role: Literal["client", "server"]) -> bytes:
        covered = b"".join(
            (
                f"evenstep {VERSION} {role:>6}".encode(),
                self.server,
                self.client,
                hashlib.sha256(self.certificate).digest(),
            )
        )
        return hmac.digest(self.secret, covered, "sha256")


def _send(sock: socket.socket, content: bytes, deadline: Deadline) -> None:
    sock.settimeout(deadline.left())
    sock.sendall(content)


def _receive(sock: socket.socket, count: int, deadline: Deadline) -> bytes:
    content = b""
    while len(content) < count:
        sock.settimeout(deadline.left())
        part = sock.recv(count - len(content))
        if not part:
            raise ConnectionResetError("the peer was gone before it proved that it knows the secret")
        content += part
    return content
