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
from evenstep.schemes import DEFAULT, Scheme, parse_scheme
from evenstep.telemetry.regular import read_regular

VARIABLE = "EVENSTEP_LAUNCH"
"""The settings that only `evenstep run` gives its workers, as JSON."""
VARIABLES: Final = MappingProxyType(
    {
        "scheme": "EVENSTEP_SCHEME",
        "batch_sizes": "EVENSTEP_BATCH_SIZES",
        "slow": "EVENSTEP_SLOW",
        "emulate": "EVENSTEP_EMULATE",
        "run_dir": "EVENSTEP_RUN_DIR",
        "timeout": "EVENSTEP_TIMEOUT",
    }
)
"""The settings that a user may put into the environment, and their variables. An empty variable counts as not set."""
_PATHS: Final = frozenset({"emulate", "run_dir"})
_SET_BY_EVENSTEP: Final = frozenset(
    {VARIABLE, "EVENSTEP_SECRET", "EVENSTEP_RESTART", "EVENSTEP_JOINED", "EVENSTEP_TASKS"}
)
"""Further variables that mean something here. A user may set the secret, too."""
HEARTBEAT_SECONDS = 20.0
SUMMARY_FILE: Final = "summary"
"""The file in the folder `marks` in which the first worker reports the end of the run, for the launcher to repeat."""

_MAX_TIMEOUT: Final = 1e9  # Seconds: 30 years, which every clock and socket takes.
A_TIMEOUT: Final = f"a positive number of seconds, at most {_MAX_TIMEOUT:g}"


class LaunchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings in the environment; None or empty if there are none.

    Attributes:
        scheme: A scheme string.
        batch_sizes: The batch sizes of the scheme `static`, such as `12,9,3` or `rank:0=12,host:b=4`.
        slow: Slowed workers, such as `3=4x`; in the variable they are separated by commas.
        emulate: The path of a cluster file.
        run_dir: The run directory. Paths are absolute.
        timeout: Seconds to wait for another worker, as text.
        resume: Whether the run directory holds a run to be continued.
        servers: The addresses of shard 0, of shard 1, ..., if the launcher started servers.
        survey_up_to: The largest batch to try, if the run only measures the workers, at sizes that evenstep chooses.
        heartbeat_seconds: How long a worker or a server may be silent.
        marks: A folder in which each worker that calls `prepare` leaves a file.
        elastic: The fewest and the most replicas, if they come and go under torchft's quorum.
        nproc_per_replica: The number of processes of each of them.
        lighthouse: The address of torchft's Lighthouse; None without one.
    """

    scheme: str | None = None
    batch_sizes: str | None = None
    slow: tuple[str, ...] = ()
    emulate: str | None = None
    run_dir: str | None = None
    timeout: str | None = None
    resume: bool = False
    servers: tuple[tuple[str, ...], ...] = ()
    survey_up_to: int | None = None
    heartbeat_seconds: float = HEARTBEAT_SECONDS
    marks: str | None = None
    elastic: tuple[int, int] | None = None
    nproc_per_replica: int = 1
    lighthouse: str | None = None

    @property
    def on_one_host(self) -> bool:
        """True if the Lighthouse is the launcher's own, which only replicas of this host can reach."""
        return self.lighthouse is not None and "://127." in self.lighthouse

    def asked_scheme(self, name: Callable[[str], str] = VARIABLES.__getitem__) -> Scheme | None:
        """Return the scheme that is asked for, by a scheme string or by batch sizes; None if none is.

        Args:
            name: Returns the name of a setting in errors.

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

    def scheme_of(self, given: Scheme | str | None) -> Scheme:
        """Return the scheme that a script gives, or else the one that is asked for here, or else the default one.

        Raises:
            ConfigError: There is no such scheme.
        """
        if given is not None:
            return parse_scheme(given)
        return self.asked_scheme() or parse_scheme(DEFAULT)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """Read the settings from this environment, and warn about a variable that only looks like one of them."""
        _warn_of_unknown(environment)
        internal = msgspec.json.decode(environment.get(VARIABLE, "{}"), type=cls)
        given: dict[str, Any] = {name: environment.get(variable, "").strip() for name, variable in VARIABLES.items()}
        given["slow"] = tuple(each.strip() for each in given["slow"].split(",")) if given["slow"] else ()
        return internal.with_given(given)

    def with_given(self, given: Mapping[str, Any]) -> Self:
        """Return the settings with these values by name, of which empty ones change nothing; paths become absolute."""
        found = {name: value for name, value in given.items() if value}
        found |= {name: str(Path(found[name]).absolute()) for name in _PATHS & found.keys()}
        return structs.replace(self, **found)

    def to_environment(self) -> dict[str, str]:
        """Return the variables with which to start the workers, without the settings that are not set."""
        internal = structs.asdict(self)
        given = {variable: internal.pop(name) for name, variable in VARIABLES.items()}
        given[VARIABLES["slow"]] = ",".join(self.slow)
        return {VARIABLE: msgspec.json.encode(internal).decode()} | {key: text for key, text in given.items() if text}

    def timeout_seconds(self, given: float | None = None) -> float:
        """Return how long a worker waits for another: as given by the script, else by the user, else 300 s.

        Raises:
            ConfigError: It is not a timeout.
        """
        if given is not None:
            return read_timeout(given, "timeout")
        return 300.0 if self.timeout is None else read_timeout(self.timeout, VARIABLES["timeout"])

    def source(self, name: str, environment: Mapping[str, str]) -> str:
        """Return where a setting came from: its variable in this environment, or else the option of `evenstep run`."""
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
    """Read a number of seconds, or its text; ConfigError, which begins with the name, if it is not a timeout."""
    try:
        seconds = 0.0 if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        seconds = 0.0
    if not 0 < seconds <= _MAX_TIMEOUT:
        raise ConfigError(f"{name} must be {A_TIMEOUT}, not {shown(value)}")
    return seconds


def read_cluster(path: Path) -> Cluster:
    """Read the cluster that a file describes; ConfigError if the file cannot be read, or does not describe one."""
    try:
        text = read_regular(path, most_bytes=16 << 20).decode()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"the cluster file {path} cannot be read ({why}): give a TOML file") from error
    return parse_cluster(text, name=str(path))


def require_emulable(cluster: Cluster, workers: int | None = None) -> None:
    """Refuse a cluster that can be simulated but not emulated, or not by this number of workers."""
    if workers is not None and len(cluster) != workers:
        raise ConfigError(
            f"the cluster to emulate describes {len(cluster)} workers but {workers} were started: make them the same"
        )
    if any(worker.spot is not None for worker in cluster.workers):
        raise ConfigError(
            "the cluster file has workers that come and go, which only evenstep simulate can follow: leave out spot"
        )
