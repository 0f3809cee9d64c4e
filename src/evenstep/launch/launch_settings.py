"""What `evenstep run` asks of the workers that it starts, carried by their environment."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Self, final

from evenstep.cluster import Cluster, parse_cluster
from evenstep.core.errors import ConfigError
from evenstep.telemetry.regular import open_regular

VARIABLE = "EVENSTEP_LAUNCH"
HEARTBEAT_SECONDS = 20.0
SUMMARY_FILE: Final = "summary"
"""In the folder `marks`, what the first worker has to say of the run at its end, for the launcher to repeat."""

_LARGEST_FILE: Final = 16 << 20
"""Bytes of a cluster file."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSettings:
    """The launcher's options; None or empty where the user gave none. Paths are absolute.

    `slow` has the texts of `--slow`, such as `3=4x`; `emulate` is a cluster file; `resume` says that the run directory
    holds a run to be continued; `servers` has the addresses of shard 0, of shard 1, ... where the launcher started any;
    `profile` is the largest batch to try where this device is to be profiled; `heartbeat_seconds` is how long a worker
    or a server may be silent; in the folder `marks` each worker that calls `prepare` leaves a file.
    """

    scheme: str | None = None
    slow: tuple[str, ...] = ()
    emulate: str | None = None
    run_dir: str | None = None
    resume: bool = False
    servers: tuple[tuple[str, ...], ...] = ()
    profile: int | None = None
    heartbeat_seconds: float = HEARTBEAT_SECONDS
    marks: str | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """What the launcher said, or nothing where no launcher did."""
        text = environment.get(VARIABLE)
        if text is None:
            return cls()
        fields = json.loads(text)
        servers = tuple(tuple(addresses) for addresses in fields["servers"])
        return cls(**{**fields, "slow": tuple(fields["slow"]), "servers": servers})

    def to_environment(self) -> dict[str, str]:
        """The variables to start the workers with."""
        return {VARIABLE: json.dumps(asdict(self))}


def read_cluster(path: Path) -> Cluster:
    """The cluster that a file describes.

    Raises:
        ConfigError: The file cannot be read, or says what it cannot mean.
    """
    try:
        with open_regular(path) as file:
            content = file.read(_LARGEST_FILE + 1)
        text = content.decode()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"the cluster file {path} cannot be read ({why}): give a TOML file") from error
    if len(content) > _LARGEST_FILE:
        raise ConfigError(f"the cluster file {path} is larger than {_LARGEST_FILE >> 20} MB: give a TOML file")
    return parse_cluster(text, name=str(path))


def require_emulable(cluster: Cluster) -> None:
    """Refuse a cluster that can be simulated but not emulated.

    Raises:
        ConfigError: Workers come and go in it.
    """
    if any(worker.spot is not None for worker in cluster.workers):
        raise ConfigError(
            "the cluster file has workers that come and go, which only evenstep simulate can follow: leave out spot"
        )
