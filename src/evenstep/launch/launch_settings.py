"""Settings of a run from the environment, where a user or `evenstep run` puts them."""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self

import msgspec
from msgspec import structs

from evenstep.cluster import Cluster, parse_cluster
from evenstep.core.errors import ConfigError, naming
from evenstep.core.nearest import nearest
from evenstep.core.shown import shown
from evenstep.schemes import Scheme, parse_scheme
from evenstep.telemetry.regular import open_regular

VARIABLE = "EVENSTEP_LAUNCH"
"""What `evenstep run` alone tells its workers, as JSON."""
VARIABLES: Final = MappingProxyType(
    {
        "scheme": "EVENSTEP_SCHEME",
        "batch_sizes": "EVENSTEP_BATCH_SIZES",
        "slow": "EVENSTEP_SLOW",
        "emulate": "EVENSTEP_EMULATE",
        "run_dir": "EVENSTEP_RUN_DIR",
        "timeout": "EVENSTEP_TIMEOUT",
        "start_from": "EVENSTEP_START_FROM",
    }
)
"""The settings that a user may put into the environment, and their variables. An empty variable counts as not set."""
_PATHS: Final = frozenset({"emulate", "run_dir", "start_from"})
_SET_BY_EVENSTEP: Final = frozenset(
    {VARIABLE, "EVENSTEP_SECRET", "EVENSTEP_RESTART", "EVENSTEP_JOINED", "EVENSTEP_TASKS"}
)
"""Further variables that mean something here. A user may set the secret, too."""
HEARTBEAT_SECONDS = 20.0
SUMMARY_FILE: Final = "summary"
"""In the folder `marks`: what the first worker reports of the run at its end, for the launcher to repeat."""

_MAX_BYTES: Final = 16 << 20
"""Of a cluster file."""
_MAX_TIMEOUT: Final = 1e9
A_TIMEOUT: Final = f"a positive number of seconds, at most {_MAX_TIMEOUT:g}"


class FindBatch(msgspec.Struct, frozen=True, kw_only=True):
    """What `evenstep run --find-batch` asks for: the largest batch to try, and the folders that get what is found."""

    largest: int
    folders: tuple[str, ...]


class LaunchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings in the environment; None or empty if there are none.

    Attributes:
        scheme: A scheme string.
        batch_sizes: The batch sizes of the scheme `static`, such as `12,9,3` or `rank:0=12,host:b=4`.
        slow: Slowed workers, such as `3=4x`; in the variable they are separated by commas.
        emulate: The path of a cluster file.
        run_dir: The run directory. Paths are absolute.
        timeout: Seconds to wait for another worker, as text.
        start_from: The run directory of an earlier run, with whose sizes this one begins.
        resume: Whether the run directory holds a run to be continued.
        servers: The addresses of shard 0, of shard 1, ..., if the launcher started servers.
        profile: The largest batch to try, if this device is to be profiled.
        find_batch: If the run is only to find the largest batches of the workers.
        heartbeat_seconds: How long a worker or a server may be silent.
        marks: A folder in which each worker that calls `prepare` leaves a file.
    """

    scheme: str | None = None
    batch_sizes: str | None = None
    slow: tuple[str, ...] = ()
    emulate: str | None = None
    run_dir: str | None = None
    timeout: str | None = None
    start_from: str | None = None
    resume: bool = False
    servers: tuple[tuple[str, ...], ...] = ()
    profile: int | None = None
    find_batch: FindBatch | None = None
    heartbeat_seconds: float = HEARTBEAT_SECONDS
    marks: str | None = None

    @property
    def measures(self) -> bool:
        """Whether the run is no training, but measures devices at sizes that evenstep chooses."""
        return self.profile is not None or self.find_batch is not None

    def asked_scheme(self, name: Callable[[str], str] = VARIABLES.__getitem__) -> Scheme | None:
        """The scheme that is asked for, by a scheme string or by batch sizes; None if none is.

        Args:
            name: What an error calls a setting.

        Raises:
            ConfigError: There is no such scheme, or both are given.
        """
        if self.scheme is not None and self.batch_sizes is not None:
            raise ConfigError(
                f"{name('batch_sizes')} fixes the sizes and {name('scheme')} {shown(self.scheme)} would set them: give"
                f" one of them (a scheme with load= takes sizes as load=static:{self.batch_sizes.replace(',', '/')})"
            )
        text = self.scheme if self.batch_sizes is None else f"static:{self.batch_sizes}"
        if text is None:
            return None
        with naming(name("scheme" if self.batch_sizes is None else "batch_sizes")):
            return parse_scheme(text)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """The settings in this environment, with a warning about a variable that looks like one and is none."""
        _warn_of_unknown(environment)
        internal = msgspec.json.decode(environment.get(VARIABLE, "{}"), type=cls)
        texts = {name: environment.get(variable, "").strip() for name, variable in VARIABLES.items()}
        given: dict[str, Any] = {name: text for name, text in texts.items() if text}
        given |= {name: str(Path(given[name]).absolute()) for name in _PATHS & given.keys()}
        if "slow" in given:
            given["slow"] = tuple(each.strip() for each in given["slow"].split(","))
        return structs.replace(internal, **given)

    def to_environment(self) -> dict[str, str]:
        """The variables with which to start the workers; those that are not set are missing."""
        internal = structs.asdict(self)
        given = {variable: internal.pop(name) for name, variable in VARIABLES.items()}
        given[VARIABLES["slow"]] = ",".join(self.slow)
        return {VARIABLE: msgspec.json.encode(internal).decode()} | {key: text for key, text in given.items() if text}

    def timeout_seconds(self, given: float | None = None) -> float:
        """How long a worker waits for another: as given by the script, else by the user, else 300 s.

        Raises:
            ConfigError: It is no timeout.
        """
        if given is not None:
            return read_timeout(given, "timeout")
        return 300.0 if self.timeout is None else read_timeout(self.timeout, VARIABLES["timeout"])

    def source(self, name: str, environment: Mapping[str, str]) -> str:
        """Where a setting came from: its variable in this environment, or else the option of `evenstep run`."""
        inherited = getattr(type(self).from_environment(environment), name) == getattr(self, name)
        return VARIABLES[name] if inherited else f"--{name.replace('_', '-')}"


def _warn_of_unknown(environment: Mapping[str, str]) -> None:
    """Warn in one process of a run: in the launcher if there is one, else in the first worker."""
    if VARIABLE in environment or environment.get("RANK", "0") != "0":
        return
    known = {*VARIABLES.values(), *_SET_BY_EVENSTEP}
    for name in sorted(environment):
        if name.startswith("EVENSTEP_") and name not in known:
            choices = nearest(name, [*VARIABLES.values(), "EVENSTEP_SECRET"])
            warnings.warn(f"the environment variable {name} is unknown and has no effect: {choices}", stacklevel=3)


def read_timeout(value: object, name: str) -> float:
    """A number of seconds, or its text; ConfigError, which begins with the name, if it is no timeout."""
    try:
        seconds = 0.0 if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        seconds = 0.0
    if not 0 < seconds <= _MAX_TIMEOUT:
        raise ConfigError(f"{name} must be {A_TIMEOUT}, not {shown(value)}")
    return seconds


def read_cluster(path: Path) -> Cluster:
    """The cluster that a file describes; ConfigError if the file cannot be read, or describes none."""
    try:
        with open_regular(path) as file:
            content = file.read(_MAX_BYTES + 1)
        text = content.decode()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"the cluster file {path} cannot be read ({why}): give a TOML file") from error
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"the cluster file {path} is larger than {_MAX_BYTES >> 20} MB: give a TOML file")
    return parse_cluster(text, name=str(path))


def require_emulable(cluster: Cluster) -> None:
    """Refuse a cluster that can be simulated but not emulated."""
    if any(worker.spot is not None for worker in cluster.workers):
        raise ConfigError(
            "the cluster file has workers that come and go, which only evenstep simulate can follow: leave out spot"
        )
