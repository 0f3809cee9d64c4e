"""The schema of the event log: every kind of event is a record, which writers fill in and readers receive.

`worker-RANK.jsonl` has the events of a worker, `server-INDEX.jsonl` those of a server, `launcher.jsonl` those of the
launcher. A line is one JSON object: `event`, the kind, and the fields of its record. Readers skip unknown kinds and
fields. A field with a default may be missing. The meaning of a field never changes: another meaning needs a new field
and a new `SCHEMA`.

`at` is in seconds of the writer's monotonic clock, which all processes of a host share. The event `run` also has the
wall clock, which relates the clocks of several hosts.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Final, TypeAlias, TypeVar, final

from msgspec import Meta, Struct, field

from evenstep.core.values import Basis

SCHEMA: Final = 3
"""Version 1 had neither `schema` nor times, and is not read; version 2 had a `report` with predictions, not `row`."""
ELASTIC: Final = "elastic"  # In `run`, the engine whose workers come and go.

# Numbers are bounded, so that a damaged log cannot overflow later computations.
_END: Final = 2**63
_Whole: TypeAlias = Annotated[int, Meta(ge=1 - _END, le=_END - 1)]
_Count: TypeAlias = Annotated[int, Meta(ge=0, le=_END - 1)]
_Number: TypeAlias = Annotated[float, Meta(gt=-_END, lt=_END)]
_Seconds: TypeAlias = Annotated[float, Meta(ge=0, lt=_END)]
_Rank: TypeAlias = Annotated[int, Meta(ge=0, lt=1_000_000)]
_Iteration: TypeAlias = Annotated[int, Meta(ge=-1, le=_END - 1)]
"""Counted from 0; -1: before the first."""

_T = TypeVar("_T")


def _added(default: _T) -> _T:
    """A field that every writer writes now; the default is its meaning in older logs without it.

    A plain default, which is not written, means that the value is unknown or does not apply.
    """
    return field(default_factory=lambda: default)


# No event can be part of a reference cycle, and readers make millions: the garbage collector need not look at them.
class Event(Struct, frozen=True, kw_only=True, tag_field="event", omit_defaults=True, gc=False):
    """Base of all events in a log; `at` is None if the time is unknown."""

    at: _Number | None = None

    @property
    def kind(self) -> str:
        """The name of the event in the file."""
        return str(self.__struct_config__.tag)


class WorkerEvent(Event, frozen=True, kw_only=True):
    """An event that the worker of this rank writes."""

    worker: _Rank


class ServerEvent(Event, frozen=True, kw_only=True):
    """An event that a server writes. `version`: version of the weights."""

    server: int = _added(0)
    at: _Number
    version: _Whole


class LauncherEvent(Event, frozen=True, kw_only=True):
    """An event that the launcher writes."""


@final
class Run(WorkerEvent, frozen=True, kw_only=True, tag="run"):
    """A worker starts. `minimum` and `maximum` samples have one entry per worker.

    `simulated`: time is virtual. `emulated`: compute takes as long as on a device described in a cluster file.
    `command`: the script and its arguments; `commit`: what git had checked out around it; empty if unknown.
    """

    schema: _Whole = 1
    unix_seconds: _Number | None = None
    workers: _Whole = 0
    scheme: str
    engine: str = _added("collective")
    global_batch_size: _Whole
    iterations_per_epoch: _Whole
    minimum: Sequence[_Whole] = ()
    maximum: Sequence[_Whole] = ()
    multiple: _Whole = _added(1)
    seed: _Whole = _added(0)
    simulated: bool = _added(False)
    emulated: bool = _added(False)
    version: str = ""
    torch: str = ""
    python: str = ""
    host: str = ""
    gpu: str | None = _added(None)
    device: str = ""
    command: str = ""
    commit: str = ""

    @property
    def wall_offset(self) -> float:
        """The seconds to add to the worker's clock to get the wall clock; 0 if unknown, as in a simulation."""
        return 0.0 if self.unix_seconds is None or self.at is None else self.unix_seconds - self.at


@final
class IterationDone(WorkerEvent, frozen=True, kw_only=True, tag="iteration"):
    """A worker has finished an iteration. `at` is its start; its parts, in seconds, follow in order.

    `cost`: the cost of its samples, in average samples, if costs differ; `padding`: the part of it that is padding.
    `basis`: the reason for its size. `row`: the worker's row of the exchange. `factors`: the machine's state before the
    iteration. On servers a push is *held* for `wait_seconds`, *committed* with its `staleness` (versions), `behind`
    (global batches) and `share`, and *released* at a `lead` under a `bound` (iterations).
    """

    iteration: _Iteration
    at: _Number
    epoch: _Count = _added(0)
    samples: _Count
    cost: _Number | None = None
    padding: _Number | None = None
    basis: Basis = _added("speed")
    iteration_seconds: _Seconds
    input_seconds: _Seconds
    compute_seconds: _Seconds
    wait_seconds: _Seconds
    comm_seconds: _Seconds
    row: Sequence[_Whole] = ()
    factors: Sequence[_Number] = ()
    staleness: _Whole | None = None
    behind: _Number | None = None
    share: _Number | None = None
    lead: _Whole | None = None
    bound: _Whole | None = None


@final
class Planned(WorkerEvent, frozen=True, kw_only=True, tag="plan"):
    """The batch sizes of all workers from this iteration of the writer on.

    Behind a barrier the first worker of each host writes it, on servers every worker.

    `basis`: `speed`: decided from speeds; `start`: equal, because no speeds are known yet.
    """

    iteration: _Iteration = _added(0)
    batch_sizes: Sequence[_Whole]
    basis: Basis = _added("speed")


@final
class Noted(WorkerEvent, frozen=True, kw_only=True, tag="note"):
    """Values that the script noted, by name; None for a value that is not finite. `samples` of the iteration."""

    iteration: _Iteration
    at: _Number
    samples: _Count
    values: Mapping[str, _Number | None]


@final
class DeviceSampled(WorkerEvent, frozen=True, kw_only=True, tag="device"):
    """The state of a worker's GPU, about once a second, where NVML tells it.

    `utilisation`: the part of the last moment in which it was busy, 0 to 1; `memory_bytes` in use by all processes.
    """

    at: _Number
    utilisation: _Number
    memory_bytes: _Count
    celsius: _Number


@final
class Disturbed(WorkerEvent, frozen=True, kw_only=True, tag="disturbance"):
    """The worker is slowed on purpose from this iteration on: `factor` times its seconds plus `extra_seconds`.

    This holds until the next such event; factor 1 and 0 extra seconds end it. Jitter, which changes in every iteration,
    is not recorded.
    """

    iteration: _Iteration
    at: _Number
    factor: _Number
    extra_seconds: _Seconds

    @property
    def by(self) -> str:
        """The slowing in a few words, such as `4x + 50 ms`; empty if it ends."""
        parts = [f"{self.factor:.3g}x"] if self.factor != 1 else []
        parts += [f"{1000 * self.extra_seconds:.3g} ms"] if self.extra_seconds else []
        return " + ".join(parts)


@final
class Failed(WorkerEvent, frozen=True, kw_only=True, tag="error"):
    """An exception of this `type` ended the worker's script, in or after this iteration."""

    iteration: _Iteration
    at: _Number
    type: str
    text: str


@final
class Ended(WorkerEvent, frozen=True, kw_only=True, tag="end"):
    """The last event of a worker: its loader was closed, or its process ended. A killed process writes none."""

    at: _Number


@final
class RanOutOfMemory(WorkerEvent, frozen=True, kw_only=True, tag="out_of_memory"):
    """A device could not hold a batch; `largest_run` is the largest batch that it has run.

    In average samples, if samples differ in cost.
    """

    iteration: _Iteration
    device: str
    samples: _Count
    largest_run: _Whole


@final
class CheckpointDone(WorkerEvent, frozen=True, kw_only=True, tag="checkpoint"):
    """All workers have saved the checkpoint of this name, or were restored from it; the first worker records it."""

    iteration: _Iteration
    at: _Number
    name: str
    restored: bool


@final
class MembersChanged(WorkerEvent, frozen=True, kw_only=True, tag="members"):
    """From this iteration on these workers are the members of an elastic run; the first of them on each host writes it.

    `elsewhere`: the number of members on other hosts, whose workers are numbered by themselves.
    """

    iteration: _Iteration
    at: _Number
    members: Sequence[_Rank]
    elsewhere: _Count = _added(0)


@final
class NotCounted(WorkerEvent, frozen=True, kw_only=True, tag="not_counted"):
    """A step of an elastic run in which a member was lost, so that the same samples are computed on again."""

    iteration: _Iteration
    at: _Number


@final
class Joined(ServerEvent, frozen=True, kw_only=True, tag="join"):
    """A worker has joined the servers as this incarnation."""

    worker: _Rank
    incarnation: _Whole = _added(0)


@final
class Left(ServerEvent, frozen=True, kw_only=True, tag="leave"):
    """A worker has left; `early`: by itself, in the middle of a pass."""

    worker: _Rank
    why: str
    early: bool = _added(False)


@final
class Begun(ServerEvent, frozen=True, kw_only=True, tag="begin"):
    """A worker has started the `number`-th pass over the data, of this epoch, with `ahead` claims at a time."""

    worker: _Rank
    number: _Whole
    epoch: _Count
    ahead: _Whole


@final
class Rested(ServerEvent, frozen=True, kw_only=True, tag="rest"):
    """A worker has no samples to compute, and waits for more or for the end of the pass.

    Its claims up to `done` are finished. If its loop has `ended`, it takes no more.
    """

    worker: _Rank
    done: _Count | None = None
    ended: bool = False


@final
class FetchedAhead(ServerEvent, frozen=True, kw_only=True, tag="more"):
    """A worker that fetches ahead was given claims until it held `ahead` besides the oldest."""

    worker: _Rank
    ahead: _Whole


@final
class Stopped(ServerEvent, frozen=True, kw_only=True, tag="stop"):
    """A worker has left its pass before the end."""

    worker: _Rank


@final
class Pushed(ServerEvent, frozen=True, kw_only=True, tag="push"):
    """All shards have staged a push: samples of a claim, computed on the version that was `pulled`.

    The worker's older claims are finished.
    """

    worker: _Rank
    claim: _Whole
    pulled: _Whole
    samples: _Count
    units: _Number
    row: Sequence[_Whole] = ()


@final
class Tallied(ServerEvent, frozen=True, kw_only=True, tag="tally"):
    """The servers' work in the last `seconds`; `samples` counts all that were committed since the run started.

    `bytes` are those of gradients and weights, as they travel between hosts.
    """

    seconds: _Seconds
    commits: _Whole
    bytes: _Whole
    samples: _Count


@final
class Regrouped(ServerEvent, frozen=True, kw_only=True, tag="regroup"):
    """From now on workers synchronise in these groups."""

    groups: Sequence[Sequence[_Whole]]
    reason: str


@final
class SnapshotWritten(ServerEvent, frozen=True, kw_only=True, tag="snapshot"):
    """A snapshot of all servers is complete."""


@final
class SnapshotFailed(ServerEvent, frozen=True, kw_only=True, tag="snapshot_failed"):
    """A snapshot could not be written; recorded once, until one succeeds again."""

    text: str


@final
class Restored(ServerEvent, frozen=True, kw_only=True, tag="restored"):
    """The servers started from the snapshot of this version."""


@final
class CommitsLost(ServerEvent, frozen=True, kw_only=True, tag="lost"):
    """A worker joined with weights that are `commits` versions newer than the servers'."""

    worker: _Rank
    commits: _Whole


@final
class ServersRestarted(LauncherEvent, frozen=True, kw_only=True, tag="servers_restarted"):
    """A server died, and the launcher restarts the servers for the `restart`-th time."""

    server: _Whole
    restart: _Whole
    text: str


@final
class ServersLost(LauncherEvent, frozen=True, kw_only=True, tag="servers_lost"):
    """The servers are gone for good; `server` died last, if known."""

    server: _Whole | None
    text: str


@final
class ServerFailed(LauncherEvent, frozen=True, kw_only=True, tag="server_failed"):
    """A server failed while it was being stopped."""

    server: _Whole
    text: str


@final
class WorkerFailed(LauncherEvent, frozen=True, kw_only=True, tag="worker_failed"):
    """A worker of a run on servers or an elastic one failed, and `how`, such as "was killed by SIGKILL"."""

    worker: _Rank
    how: str


RECORDS: Final[Mapping[str, type[Event]]] = {
    str(record.__struct_config__.tag): record
    for writer in (WorkerEvent, ServerEvent, LauncherEvent)
    for record in writer.__subclasses__()
}
