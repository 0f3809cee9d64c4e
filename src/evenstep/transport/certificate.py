"""The TLS certificate of a listener, made when it starts and kept in memory only."""

import contextlib
import os
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, Self, final

from evenstep.core.errors import ConfigError

_LIFETIME: Final = timedelta(days=3650)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """A self-signed certificate in DER form, and the TLS context that uses it.

    It is not signed by a CA. The handshake's HMAC covers the certificate, so a client can trust it.
    """

    der: bytes
    context: ssl.SSLContext

    @classmethod
    def create(cls) -> Self:
        """Make a certificate with a new key; ConfigError if the package `cryptography` is missing."""
        try:
            from cryptography import x509
            from cryptography.hazmat.primitives import hashes, serialization
            from cryptography.hazmat.primitives.asymmetric import ec
        except ImportError as error:
            raise ConfigError("connections between hosts are encrypted: pip install cryptography") from error
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "evenstep")])
        now = datetime.now(UTC)
        certificate = (
            x509.CertificateBuilder(issuer_name=name, subject_name=name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + _LIFETIME)
            .sign(key, hashes.SHA256())
        )
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0  # Sessions are never resumed, and a ticket would look like the start of a message.
        with _as_file(certificate.public_bytes(serialization.Encoding.PEM) + private) as path:
            context.load_cert_chain(path)
        return cls(der=certificate.public_bytes(serialization.Encoding.DER), context=context)


def client_context() -> ssl.SSLContext:
    """Make the TLS context of a client. It accepts any certificate; the proof of the secret then verifies it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


@contextlib.contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """Yield a path from which OpenSSL can read the key. Servers run on Linux alone, where it is in memory only."""
    with open(os.memfd_create("evenstep", os.MFD_CLOEXEC), "wb") as file:
        file.write(content)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"
