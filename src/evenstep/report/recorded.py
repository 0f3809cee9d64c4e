"""The events of a run directory as one value."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self, final

from evenstep.core.errors import ConfigError
from evenstep.core.supervision import Why
from evenstep.report.happened import Happening, happening_of
from evenstep.report.iterations import Iterations, IterationsBuilder, true_waits
from evenstep.telemetry import ROLES, Event, read_events
from evenstep.telemetry.events import (
    Begun,
    IterationDone,
    Joined,
    Left,
    Noted,
    Planned,
    Run,
    Tallied,
    WorkerEvent,
    WorkerFailed,
)

SERVER: Final = "server"
"""The engine of a run on parameter servers, as the event `run` names it."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRecord:
    """What the servers did: `commits` and `bytes` of gradients that reached the first server.

    `samples` are those committed since the run started. `early` are workers that left by themselves, in the middle of a
    pass or before a pass that others started.
    """

    commits: int
    bytes: int
    samples: int
    attendance: tuple[Joined | Left, ...]
    early: frozenset[int]

    @classmethod
    def from_events(cls, events: Iterable[Event]) -> Self:
        """From the events of `server-*.jsonl`."""
        tallies: list[Tallied] = []
        attendance: list[Joined | Left] = []
        passes: dict[int, int] = {}
        done: dict[int, bool] = {}  # Workers that are done, and whether they left in the middle of a pass.
        joined = set()
        for event in events:
            if isinstance(event, Tallied):
                tallies.append(event)
            elif isinstance(event, Begun):
                passes[event.worker] = event.number
            elif isinstance(event, Joined):
                joined.add(event.worker)
                attendance.append(event)
                done.pop(event.worker, None)
            elif isinstance(event, Left) and event.worker in joined:
                attendance.append(event)
                done.pop(event.worker, None)
                if event.why == Why.DONE:
                    done[event.worker] = event.early
        latest = max(passes.values(), default=-1)
        return cls(
            commits=sum(each.commits for each in tallies),
            bytes=sum(each.bytes for each in tallies),
            samples=tallies[-1].samples if tallies else 0,
            attendance=tuple(attendance),
            early=frozenset(worker for worker, early in done.items() if early or passes.get(worker, latest) < latest),
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """A run.

    Attributes:
        iterations: By worker. On servers, workers have different numbers of iterations.
        about: By worker, the event with which it started.
        planned: Each change of all workers' batch sizes.
        servers: What parameter servers recorded; None for a run without servers.
        notes: What the script noted, worker after worker.
        happenings: What deserves a line each.
        failed: How workers' processes failed, by worker.
    """

    scheme: str
    global_batch_size: int
    iterations_per_epoch: int
    iterations: Mapping[int, Iterations]
    about: Mapping[int, Run]
    planned: tuple[Planned, ...]
    servers: ServerRecord | None
    notes: tuple[Noted, ...]
    happenings: tuple[Happening, ...]
    failed: Mapping[int, str]

    @property
    def workers(self) -> list[int]:
        """The workers that recorded anything, by rank."""
        return sorted(self.iterations)

    @property
    def unrecorded(self) -> int:
        """The number of workers without an iteration here, for example if each host has a separate run directory."""
        return max(max((each.workers for each in self.about.values()), default=0) - len(self.iterations), 0)

    @property
    def length(self) -> int:
        """The iterations that every worker has finished."""
        return min(len(done) for done in self.iterations.values())

    @property
    def counted(self) -> Mapping[int, Iterations]:
        """The iterations that count: on servers all, otherwise those that every worker has finished."""
        stop = self.length if self.servers is None else None
        return {worker: self.iterations[worker][:stop] for worker in self.workers}

    @property
    def plans(self) -> list[Sequence[int]]:
        """All workers' decided batch sizes, each time that they changed."""
        return [each.batch_sizes for each in self.planned]

    @property
    def simulated(self) -> bool:
        """Whether its time was virtual."""
        return any(about.simulated for about in self.about.values())

    @property
    def emulated(self) -> bool:
        """Whether any of its workers had the speed of another device."""
        return any(about.emulated for about in self.about.values())

    @property
    def kind(self) -> str:
        """What is not real about the run, to stand behind its name; empty for a real run."""
        if self.simulated:
            return " (simulated)"
        return " (emulated devices)" if self.emulated else ""

    def wall_offset(self, writer: int | None) -> float:
        """What to add to a worker's clock to get the wall clock; None: the clock of the servers and the launcher."""
        return self.about[min(self.about) if writer is None else writer].wall_offset


@final
class RunBuilder:
    """Takes the events of a run one by one, each writer's in their order, and makes the run of them at any time.

    A worker that was restarted into the same directory counts from its last start; on servers it continued the same
    run, and all of it counts. With `keep`, only about that many of each worker's latest iterations are held, and no
    notes.
    """

    def __init__(self, *, keep: int | None = None) -> None:
        self._keep = keep
        self._about: dict[int, Run] = {}
        self._plans: dict[int, list[Planned]] = defaultdict(list)
        self._notes: dict[int, list[Noted]] = defaultdict(list)
        self._happenings: list[Happening] = []
        self._failed: dict[int, str] = {}
        self._server_events: list[Event] = []
        self.done: dict[int, IterationsBuilder] = {}

    def take(self, event: Event) -> None:
        """Add an event."""
        if isinstance(event, WorkerEvent):
            if isinstance(event, Run):
                self._start(event)
            elif event.worker not in self.done:
                return
            self._take_of_worker(event)
        elif isinstance(event, Tallied | Begun | Joined | Left):
            self._server_events.append(event)
        elif isinstance(event, WorkerFailed):
            self._failed[event.worker] = event.how
        happening = happening_of(event)
        if happening is not None:
            self._happenings.append(happening)

    def _start(self, event: Run) -> None:
        worker = event.worker
        self._about[worker] = event
        if event.engine != SERVER or worker not in self.done:
            self.done[worker] = IterationsBuilder(keep=self._keep)
            self._plans[worker], self._notes[worker] = [], []

    def _take_of_worker(self, event: WorkerEvent) -> None:
        if isinstance(event, IterationDone):
            self.done[event.worker].take(event)
        elif isinstance(event, Planned):
            plans = self._plans[event.worker]
            plans.append(event)
            if self._keep is not None and len(plans) > 2 * self._keep:
                del plans[1 : -self._keep]
        elif isinstance(event, Noted) and self._keep is None:
            self._notes[event.worker].append(event)

    def finish(self) -> RecordedRun:
        """The run so far.

        Raises:
            ConfigError: No worker has finished an iteration, or behind a barrier no iteration is in all files.
        """
        iterations = {worker: each.finish() for worker, each in self.done.items() if each.count}
        # Files are read one after the other, so the newest start is not the last one that was read.
        newest = max(self._about.values(), key=lambda about: about.unix_seconds or 0.0, default=None)
        if newest is not None:
            iterations = {worker: done for worker, done in iterations.items() if self._is_of(newest, worker, done)}
        if newest is None or not iterations:
            raise ConfigError("no worker has finished an iteration yet: there is nothing to report")
        served = newest.engine == SERVER
        return RecordedRun(
            scheme=newest.scheme,
            global_batch_size=newest.global_batch_size,
            iterations_per_epoch=newest.iterations_per_epoch,
            iterations=iterations if served else true_waits(iterations),
            about=dict(self._about),
            planned=self._planned(iterations),
            servers=ServerRecord.from_events(self._server_events) if served else None,
            notes=tuple(note for notes in self._notes.values() for note in notes),
            happenings=tuple(self._happenings),
            failed=dict(self._failed),
        )

    def _planned(self, iterations: Mapping[int, Iterations]) -> tuple[Planned, ...]:
        """The plans that a worker recorded, on servers the first worker that lived until it got any.

        Without a plan that has a size for each worker there is one, of each worker's first batch.
        """
        count = max(iterations) + 1
        for worker in sorted(iterations):
            plans = tuple(plan for plan in self._plans[worker] if len(plan.batch_sizes) >= count)
            if plans:
                return plans
        first = {worker: int(done.samples[0]) for worker, done in iterations.items()}
        return (Planned(worker=min(first), batch_sizes=[first.get(worker, 0) for worker in range(count)]),)

    def _is_of(self, newest: Run, worker: int, done: Iterations) -> bool:
        """Whether these iterations are of the newest start, which may have fewer workers.

        Behind a barrier all workers start before the first iteration; on servers each starts by itself.
        """
        if newest.workers and worker >= newest.workers:
            return False
        about = self._about[worker]
        if about is newest or newest.engine == SERVER or newest.unix_seconds is None:
            return True
        ended = done.began[-1] + done.iteration_seconds[-1] + about.wall_offset
        return not ended < newest.unix_seconds  # Unknown times count.


def recorded_run(*events: Iterable[Event]) -> RecordedRun:
    """The run of these events, in the order in which `telemetry.read_events` gives them.

    Raises:
        ConfigError: No worker has finished an iteration.
    """
    builder = RunBuilder()
    for some in events:
        for event in some:
            builder.take(event)
    return builder.finish()


def read_run(run_dir: Path, *, progress: Callable[[int], None] | None = None) -> RecordedRun:
    """The run in this directory; `progress` is called now and then with how many more bytes were read.

    Raises:
        ConfigError: There are no events, they are damaged, or no worker has finished an iteration.
    """
    return recorded_run(*(read_events(run_dir, role=role, progress=progress) for role in ROLES))
