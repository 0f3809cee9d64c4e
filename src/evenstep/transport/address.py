"""How an address is written: `unix:@name`, `tcp://host:port` or, encrypted, `tls://host:port`."""

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
    """Where a listener can be reached: the `name` of an abstract Unix socket, or a host's name or number and a port."""

    scheme: UrlScheme
    name: str
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read an address; ConfigError if it is none."""
        if text.startswith("unix:@") and len(text) > len("unix:@"):
            return cls(scheme="unix", name=text.removeprefix("unix:@"))
        try:
            parts = urlsplit(text)
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if not host or not port or text not in (f"{scheme}://{parts.netloc}" for scheme in ("tcp", "tls")):
            raise ConfigError(f"there is no address {text!r}: use unix:@NAME, tcp://HOST:PORT or tls://HOST:PORT")
        return cls(scheme=cast("UrlScheme", parts.scheme), name=host, port=port)

    def __str__(self) -> str:
        if self.scheme == "unix":
            return f"unix:@{self.name}"
        host = f"[{self.name}]" if ":" in self.name else self.name
        return f"{self.scheme}://{host}:{self.port}"

    @property
    def abstract(self) -> str:
        """What a Unix socket is bound to: the zero in front keeps the name out of the file system."""
        return f"\0{self.name}"


def is_loopback(sock: socket.socket) -> bool:
    """Whether what a TCP socket is bound to stays on this host."""
    return ipaddress.ip_address(sock.getsockname()[0]).is_loopback
