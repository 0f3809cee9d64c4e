"""Addresses: `unix:@name`, `tcp://host:port` or, encrypted, `tls://host:port`."""

import ipaddress
import socket
from dataclasses import dataclass
from typing import Literal, Self, TypeAlias, cast, final
from urllib.parse import urlsplit

from evenstep.core.errors import ConfigError

UrlScheme: TypeAlias = Literal["unix", "tcp", "tls"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The address of a listener. `name`: an abstract Unix socket, or a host name or IP address."""

    scheme: UrlScheme
    name: str
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read an address; ConfigError if it is invalid."""
        if text.startswith("unix:@") and len(text) > len("unix:@"):
            return cls(scheme="unix", name=text.removeprefix("unix:@"))
        try:
            parts = urlsplit(text)
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if not host or not port or text not in (f"{scheme}://{parts.netloc}" for scheme in ("tcp", "tls")):
            raise ConfigError(f"invalid address {text!r}: use unix:@NAME, tcp://HOST:PORT or tls://HOST:PORT")
        return cls(scheme=cast("UrlScheme", parts.scheme), name=host, port=port)

    def __str__(self) -> str:
        if self.scheme == "unix":
            return f"unix:@{self.name}"
        host = f"[{self.name}]" if ":" in self.name else self.name
        return f"{self.scheme}://{host}:{self.port}"

    @property
    def abstract(self) -> str:
        """The name to which a Unix socket is bound. The leading zero keeps it out of the file system."""
        return f"\0{self.name}"


def is_loopback(sock: socket.socket) -> bool:
    """True if a TCP socket is bound to the loopback interface."""
    return ipaddress.ip_address(sock.getsockname()[0]).is_loopback
