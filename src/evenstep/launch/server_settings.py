"""The settings of a run's servers, and how they are passed."""

import sys
from pathlib import Path
from typing import Final, Self, final

import msgspec
from msgspec import structs

from evenstep.core.errors import ConfigError

SECRET_VARIABLE: Final = "EVENSTEP_SECRET"
"""The secret that servers and workers share, in hexadecimal; passed in the environment only, never as an argument."""

SERVER_COMMAND: Final = (sys.executable, "-m", "evenstep.server.program")


def read_secret(text: str) -> bytes:
    """Read the secret of the servers; ConfigError unless it has enough hexadecimal digits."""
    try:
        secret = bytes.fromhex(text)
    except (TypeError, ValueError):
        raise ConfigError("the secret of the servers must be hexadecimal digits") from None
    from evenstep.transport.secure import require_secret  # The launcher passes it on unread.

    require_secret(secret)
    return secret


@final
class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the servers of a run; encoded, the argument of the server program.

    Attributes:
        count: Number of servers, and of shards; 1 or more.
        workers: Number of workers of the run.
        snapshots: Where servers write and find their snapshots.
        scratch: A folder that servers remove if the process that started them was killed before it could.
        listen: The host name or address that they listen on.
        resume: Whether they continue from the last snapshot.
        allow: Names of further optimizers that they may run.
        heartbeat_seconds: How long a worker or a server may be silent before it is given up.
        snapshot_seconds: Time between two snapshots.
        parent: Addresses of the parent, for a group server.
        name_lost: Whether the servers' summary names lost workers.
        restarts: How often all servers are restarted after one died.
        start_seconds: How long a server may take until it listens.
        end_seconds: How long servers may take to end, last snapshots included, before they are killed.
        command: The server program, to which the encoded settings are appended.
        secret: The shared secret in hexadecimal; None draws one. It is never encoded.
        name: The name of a group server in messages.
        until_closed: Whether servers run beyond the end of the main thread, for other processes.
        index: The number of this server; 0 for a group server. `Servers` sets this and what follows.
        port: The port that it listens on; 0 lets the system choose one.
        shards: For shard 0: the addresses of the other shards.
        host: The process of the worker that hosts this server, which it supervises; 0 if there is none.
        recipes: Modules of recipes to import, with their folders.
    """

    count: int
    workers: int
    snapshots: Path
    scratch: Path | None = None
    listen: str = "127.0.0.1"
    resume: bool = False
    allow: tuple[str, ...] = ()
    heartbeat_seconds: float = 20.0
    snapshot_seconds: float = 60.0
    parent: tuple[str, ...] = ()
    name_lost: bool = True
    restarts: int = 3
    start_seconds: float = 300.0
    end_seconds: float = 60.0
    command: tuple[str, ...] = SERVER_COMMAND
    secret: str | None = None
    name: str = ""
    until_closed: bool = False
    index: int = 0
    port: int = 0
    shards: tuple[tuple[str, ...], ...] = ()
    host: int = 0
    recipes: tuple[tuple[str, str], ...] = ()

    def encode(self) -> str:
        """Encode as JSON."""
        return msgspec.json.encode(structs.replace(self, secret=None), enc_hook=str).decode()

    @classmethod
    def decode(cls, text: str) -> Self:
        """The inverse of `encode`, except for the secret."""
        return msgspec.json.decode(text, type=cls, dec_hook=lambda kind, value: kind(value))
