"""What the servers of a run wrote down, and what their workers were told of their pushes, in a few numbers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any, Self, final

from evenstep.core.supervision import Why


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PushRecord:
    """What a worker was told of one push.

    `staleness` is how many versions were committed between its pull and it, `behind` the same in global batches; None
    where nothing of it was committed. `lead` is its worker's, in iterations; None where it was told none.
    """

    staleness: int | None
    behind: float | None
    lead: int | None

    @classmethod
    def from_event(cls, event: Mapping[str, Any]) -> Self:
        """From a worker's event `iteration`."""
        return cls(staleness=event.get("staleness"), behind=event.get("behind"), lead=event.get("lead"))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Attendance:
    """A worker came, or went: `why` is None where it came. `at` in seconds of the server's clock."""

    worker: int
    at: float
    why: str | None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRecord:
    """What the servers did: `commits` and `bytes` of gradients that reached the first of them.

    `samples` are those committed since the run began. `early` are workers that left by themselves, in the middle of a
    pass or before one that others began.
    """

    commits: int
    bytes: int
    samples: int
    attendance: tuple[Attendance, ...]
    early: frozenset[int]

    @classmethod
    def from_events(cls, events: Iterable[Mapping[str, Any]]) -> Self:
        """From the events of `server-*.jsonl`; those of other kinds than are counted here may be among them."""
        tallies, attendance = [], []
        passes: dict[int, int] = {}
        done: dict[int, bool] = {}  # Those who are done, and whether in the middle of a pass.
        came = set()
        for event in events:
            if event["event"] == "tally":
                tallies.append(event)
            elif event["event"] == "begin":
                passes[event["worker"]] = event["number"]
            elif event["event"] == "join" or (event["event"] == "leave" and event["worker"] in came):
                came.add(event["worker"])  # Who never came does not go.
                attendance.append(Attendance(worker=event["worker"], at=event["at"], why=event.get("why")))
                done.pop(event["worker"], None)
                if event.get("why") == Why.DONE:
                    done[event["worker"]] = event.get("early", False)
        latest = max(passes.values(), default=-1)
        return cls(
            commits=sum(each["commits"] for each in tallies),
            bytes=sum(each["bytes"] for each in tallies),
            samples=tallies[-1]["samples"] if tallies else 0,
            attendance=tuple(attendance),
            early=frozenset(worker for worker, early in done.items() if early or passes.get(worker, latest) < latest),
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PushSummary:
    """One worker's pushes: staleness in versions, `behind` in global batches, and its largest lead in iterations.

    `committed` pushes are those of which something was committed; without any, staleness is 0.
    """

    worker: int
    committed: int
    mean_staleness: float
    largest_staleness: int
    mean_behind: float
    largest_behind: float
    largest_lead: int
    total_wait_seconds: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """A worker that went."""

    worker: int
    why: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ServedSummary:
    """What the servers did, and how stale the pushes were.

    `bytes_per_second` are gradients that reached the first server. Rates are over the `training_seconds` of the run, as
    its samples per second are. All are 0 where the servers' events are not in the run directory.
    """

    pushes: tuple[PushSummary, ...]
    commits: int
    commits_per_second: float
    bytes_per_second: float
    samples_committed: int
    joins: int
    leaves: tuple[Leave, ...]

    @classmethod
    def of(
        cls,
        pushes: tuple[PushSummary, ...],
        servers: ServerRecord,
        training_seconds: float,
    ) -> Self:
        """The summary of what workers and servers wrote down."""
        return cls(
            pushes=pushes,
            commits=servers.commits,
            commits_per_second=servers.commits / training_seconds,
            bytes_per_second=servers.bytes / training_seconds,
            samples_committed=servers.samples,
            joins=sum(each.why is None for each in servers.attendance),
            leaves=tuple(
                Leave(worker=each.worker, why=each.why) for each in servers.attendance if each.why is not None
            ),
        )


def summary_of_pushes(worker: int, pushes: Sequence[PushRecord], total_wait_seconds: float) -> PushSummary:
    """One worker's pushes in a few numbers."""
    staleness = [each.staleness for each in pushes if each.staleness is not None]
    behind = [each.behind for each in pushes if each.behind is not None]
    return PushSummary(
        worker=worker,
        committed=len(staleness),
        mean_staleness=mean(staleness) if staleness else 0.0,
        largest_staleness=max(staleness, default=0),
        mean_behind=mean(behind) if behind else 0.0,
        largest_behind=max(behind, default=0.0),
        largest_lead=max((each.lead for each in pushes if each.lead is not None), default=0),
        total_wait_seconds=total_wait_seconds,
    )
