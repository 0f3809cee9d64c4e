"""What the files of a run directory hold: every kind of event, as a frozen record.

`worker-RANK.jsonl` has what a worker saw, `server-INDEX.jsonl` what reached and left the servers, `launcher.jsonl` what
became of them. A line is one JSON object with `event`, its writer (`worker` or `server`), and the fields of the record
below that has this `kind`. A reader must pass over kinds and fields that it does not know; a field with a default may
be missing. What a field that is there means never changes: a change of meaning is a new field, and a new `SCHEMA`.

Seconds named `at` are of the writer's monotonic clock, which all processes of a host share; the wall clock of the event
`run` ties the clocks of several hosts together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, Final, TypeAlias, final, get_args

from evenstep.core.errors import ConfigError

SCHEMA: Final = 2
"""Version 1 had neither `schema` nor the times of iterations."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A worker begins; each number of samples per worker has one entry for each.

    `emulated`: its compute takes as long as on another device, which a cluster file describes.
    """

    kind: ClassVar[str] = "run"
    scheme: str
    global_batch_size: int
    iterations_per_epoch: int
    schema: int = 1
    engine: str = "collective"
    workers: int = 0
    minimum: Sequence[int] = ()
    maximum: Sequence[int] = ()
    multiple: int = 1
    seed: int = 0
    at: float | None = None
    unix_seconds: float | None = None
    simulated: bool = False
    emulated: bool = False
    version: str = ""
    torch: str = ""
    python: str = ""
    host: str = ""
    gpu: str | None = None
    device: str = ""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class IterationDone:
    """A worker's iteration is over: its parts in seconds, in their order, and what was told of it.

    `basis` is that of its sizes, `report` the worker's row of the exchange, `factors` what was known of its machine
    before. On servers a push is
    *held* for `wait_seconds`, *committed* with its `staleness` (versions), `behind` (global batches) and `share`, and
    *released* at a `lead` under a `bound` (iterations); None where nothing of it was.
    """

    kind: ClassVar[str] = "iteration"
    iteration: int
    samples: int
    iteration_seconds: float
    input_seconds: float
    compute_seconds: float
    wait_seconds: float
    comm_seconds: float
    epoch: int = 0
    basis: str = "speed"
    at: float | None = None
    report: Sequence[int] = ()
    factors: Sequence[float] = ()
    staleness: int | None = None
    behind: float | None = None
    share: float | None = None
    lead: int | None = None
    bound: int | None = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A worker has heard of other sizes, which hold from its iteration on, or of another `basis` of the same sizes.

    `speed`: they were decided; `start`: they are equal because no speeds are known yet; `comparison`: they are equal
    for a few iterations.
    """

    kind: ClassVar[str] = "plan"
    batch_sizes: Sequence[int]
    iteration: int = 0
    basis: str = "speed"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """The script noted values by name, None for what is no number; `samples` are those of the iteration."""

    kind: ClassVar[str] = "note"
    iteration: int
    at: float
    samples: int
    values: Mapping[str, float | None]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbed:
    """From this iteration on a worker is made slower on purpose: `factor` times its seconds, and `extra_seconds`.

    It holds until the next one; 1 and 0 end it. Jitter, which is new in every iteration, is not told.
    """

    kind: ClassVar[str] = "disturbance"
    iteration: int
    at: float
    factor: float
    extra_seconds: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """An exception of this `type` ends a worker's script, in or after this iteration (-1: before the first)."""

    kind: ClassVar[str] = "error"
    iteration: int
    at: float
    type: str
    text: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A worker has written its last: it closed its loader, or its process ends; it failed where a `Failed` is before.

    A process that is killed writes none.
    """

    kind: ClassVar[str] = "end"
    at: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """`evenstep profile` has measured a batch of this size: seconds of its compute, and the memory that it took.

    `spread` is how much longer iterations took on average, as a part of the seconds, which are the fewest.
    """

    kind: ClassVar[str] = "profiled"
    samples: int
    seconds: float
    peak_bytes: int
    spread: float = 0.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileDone:
    """`evenstep profile` has measured all; None: how much memory there is was not found out."""

    kind: ClassVar[str] = "profile"
    capacity_bytes: int | None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RanOutOfMemory:
    """A device could not hold a batch; `largest_run` is the largest that had run on it."""

    kind: ClassVar[str] = "out_of_memory"
    iteration: int
    device: str
    samples: int
    largest_run: int
    at: float | None = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDone:
    """All workers saved the checkpoint of this name together, or went on from it; written by the first of them."""

    kind: ClassVar[str] = "checkpoint"
    iteration: int
    at: float
    name: str
    restored: bool


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A worker came to the servers, as this incarnation."""

    kind: ClassVar[str] = "join"
    worker: int
    at: float
    version: int
    incarnation: int = 0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """A worker went; `early`: by itself, in the middle of a pass."""

    kind: ClassVar[str] = "leave"
    worker: int
    at: float
    version: int
    why: str
    early: bool = False


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A worker begins a pass over the data, the `number`-th, of this epoch; it holds so many claims `ahead`."""

    kind: ClassVar[str] = "begin"
    worker: int
    at: float
    version: int
    number: int
    epoch: int
    ahead: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Rested:
    """A worker has nothing to compute on, and waits for more or for the end of the pass."""

    kind: ClassVar[str] = "rest"
    worker: int
    at: float
    version: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """A worker has left its pass before the end."""

    kind: ClassVar[str] = "stop"
    worker: int
    at: float
    version: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """A push was staged whole: samples of a claim, computed on the version that was pulled."""

    kind: ClassVar[str] = "push"
    worker: int
    at: float
    version: int
    claim: int
    pulled: int
    samples: int
    units: int
    report: Sequence[int]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Tallied:
    """What the servers did in these seconds; `samples` are those committed since the run began."""

    kind: ClassVar[str] = "tally"
    at: float
    version: int
    seconds: float
    commits: int
    bytes: int
    samples: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Regrouped:
    """Workers synchronise in other groups from now on."""

    kind: ClassVar[str] = "regroup"
    at: float
    version: int
    groups: Sequence[Sequence[int]]
    reason: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotWritten:
    """A checkpoint of the servers is whole."""

    kind: ClassVar[str] = "snapshot"
    at: float
    version: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotFailed:
    """No checkpoint of the servers can be written; told once, until one is again."""

    kind: ClassVar[str] = "snapshot_failed"
    at: float
    version: int
    text: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """The servers begin with what the snapshot of this version holds."""

    kind: ClassVar[str] = "restored"
    at: float
    version: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CommitsLost:
    """A worker came with weights that are so many commits newer than the servers'."""

    kind: ClassVar[str] = "lost"
    worker: int
    at: float
    version: int
    commits: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ServersRestarted:
    """A server died, and the launcher starts them again, for the `restart`-th time."""

    kind: ClassVar[str] = "servers_restarted"
    server: int
    restart: int
    text: str
    at: float | None = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ServersLost:
    """The servers are gone for good; `server` died last, where that is known."""

    kind: ClassVar[str] = "servers_lost"
    server: int | None
    text: str
    at: float | None = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFailed:
    """A server did not end well when the run was over."""

    kind: ClassVar[str] = "server_failed"
    server: int
    text: str
    at: float | None = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFailed:
    """A worker of a run on servers ended `how`, such as "was killed by SIGKILL", as its keeper saw."""

    kind: ClassVar[str] = "worker_failed"
    worker: int
    how: str
    at: float | None = None


Event: TypeAlias = (
    Run
    | IterationDone
    | Planned
    | Noted
    | Disturbed
    | RanOutOfMemory
    | Failed
    | Ended
    | Profiled
    | ProfileDone
    | CheckpointDone
    | Joined
    | Left
    | Begun
    | Rested
    | Stopped
    | Pushed
    | Tallied
    | Regrouped
    | SnapshotWritten
    | SnapshotFailed
    | Restored
    | CommitsLost
    | ServersRestarted
    | ServersLost
    | ServerFailed
    | WorkerFailed
)

RECORDS: Final[Mapping[str, type[Any]]] = {record.kind: record for record in get_args(Event)}


def parse_event(line: Mapping[str, Any]) -> Event | None:
    """The record of a line of the log; None for a kind that has none here.

    Raises:
        ConfigError: A field that every version has written is missing, or the log is of a later schema.
    """
    record = RECORDS.get(line["event"])
    if record is None:
        return None
    known = {each.name: each for each in fields(record)}
    for name, each in known.items():
        if name not in line and each.default is MISSING and each.default_factory is MISSING:
            raise ConfigError(
                f"an event {line['event']!r} has no {name!r}: it was written by another version of evenstep"
            )
    if line["event"] == Run.kind and line.get("schema", 1) > SCHEMA:
        raise ConfigError(
            f"the events are of schema {line['schema']}, and this version of evenstep knows those up to {SCHEMA}: use a"
            " newer one"
        )
    event: Event = record(**{name: line[name] for name in known if name in line})
    return event
