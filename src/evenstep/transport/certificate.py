"""The certificate of one listener: made when it starts, kept in memory, gone with it."""

import contextlib
import os
import ssl
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, Self, final

from evenstep.core.errors import ConfigError

_LIFETIME: Final = timedelta(days=3650)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """A self-signed certificate, `der` as it goes over the line, and the TLS context that serves it.

    Nobody vouches for it: a client knows it for its server's by the proof of the secret, which covers it.
    """

    der: bytes
    context: ssl.SSLContext

    @classmethod
    def create(cls) -> Self:
        """A new one, with a new key.

        Raises:
            ConfigError: The package that makes certificates is missing.
        """
        try:
            from cryptography import x509
            from cryptography.hazmat.primitives import hashes, serialization
            from cryptography.hazmat.primitives.asymmetric import ec
        except ImportError as error:
            raise ConfigError(
                "listening beyond this host encrypts, which needs a package more: pip install 'evenstep[hosts]'"
            ) from error
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
        context.num_tickets = 0  # Nobody resumes, and a ticket would look like a message that has begun.
        with _as_file(certificate.public_bytes(serialization.Encoding.PEM) + private) as path:
            context.load_cert_chain(path)
        return cls(der=certificate.public_bytes(serialization.Encoding.DER), context=context)


def client_context() -> ssl.SSLContext:
    """The TLS context of a client, which takes any certificate: the proof of the secret shows whose it is."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


@contextlib.contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """A path from which OpenSSL, which takes nothing else, can read the key; on no disk, where the system allows."""
    try:
        descriptor = os.memfd_create("evenstep", os.MFD_CLOEXEC)
    except (AttributeError, OSError):
        with tempfile.NamedTemporaryFile(prefix="evenstep-") as file:  # Readable by this user only.
            file.write(content)
            file.flush()
            yield file.name
        return
    with open(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        yield f"/proc/self/fd/{descriptor}"
