"""The events of a run directory as one value."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain, groupby
from pathlib import Path
from typing import Final, Self, final

import numpy as np

from evenstep.core.errors import ConfigError
from evenstep.core.supervision import Why
from evenstep.report.account.absences import Absences
from evenstep.report.happened import Happening, happening_of
from evenstep.report.iterations import Iterations, IterationsBuilder, true_waits
from evenstep.telemetry import ROLES, Event, read_events
from evenstep.telemetry.events import (
    ELASTIC,
    DeviceSampled,
    IterationDone,
    Joined,
    Left,
    MembersChanged,
    NotCounted,
    Noted,
    Planned,
    Run,
    Tallied,
    WorkerEvent,
    WorkerFailed,
)

SERVER: Final = "server"
"""The name of the engine of a run on parameter servers, in the event `run`."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """A worker that left."""

    worker: int
    why: str


@final
@dataclass(slots=True, kw_only=True)
class ServerRecord:
    """The servers' work; all values are 0 if their events are not in the run directory.

    `bytes` are of gradients that reached the first server, `samples_committed` those since the run started. Rates are
    over the most seconds that any worker spent in its iterations.
    """

    commits: int = 0
    commits_per_second: float = 0.0
    bytes: int = 0
    bytes_per_second: float = 0.0
    samples_committed: int = 0
    joins: int = 0
    leaves: tuple[Leave, ...] = ()

    def take(self, event: Event) -> None:
        """Add an event of a server."""
        match event:
            case Tallied():
                self.commits += event.commits
                self.bytes += event.bytes
                self.samples_committed = event.samples
            case Joined():
                self.joins += 1
            case Left() if event.why != Why.NEVER_CAME:
                self.leaves += (Leave(worker=event.worker, why=event.why),)

    def over(self, seconds: float) -> Self:
        """The same with rates over these seconds."""
        if not seconds:
            return self
        return replace(self, commits_per_second=self.commits / seconds, bytes_per_second=self.bytes / seconds)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticRecord:
    """The members of an elastic run over time.

    Attributes:
        members: The latest members on this host.
        joins: How often a process has joined.
        deaths: How often one has failed, if the launcher's events are in the run directory.
        not_counted: The number of steps that did not count, since a member was lost, and were computed again.
    """

    members: tuple[int, ...]
    joins: int
    deaths: int
    not_counted: int

    @property
    def text(self) -> str:
        """The same in a line."""
        there = " ".join(map(str, self.members))
        return f"members {there}; {self.joins} joined, {self.deaths} died; steps that did not count: {self.not_counted}"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """A run.

    Attributes:
        iterations: The iterations by worker, in order. On servers, workers have different numbers of iterations.
        about: The event with which each worker started.
        planned: Each change of all workers' batch sizes.
        servers: The records of parameter servers; None for a run without servers.
        absent: The reason why each worker that servers miss left before the end.
        elastic: Who came and went; None for a run whose workers do not.
        notes: The notes of the script, worker after worker.
        happenings: Events that deserve a line each.
        devices: The states of GPUs, by worker, where they were recorded.
        began: The begin of the first iteration, by the wall clock.
    """

    scheme: str
    global_batch_size: int
    iterations_per_epoch: int
    iterations: Mapping[int, Iterations]
    about: Mapping[int, Run]
    planned: tuple[Planned, ...]
    servers: ServerRecord | None
    absent: Mapping[int, str]
    elastic: ElasticRecord | None
    notes: tuple[Noted, ...]
    happenings: tuple[Happening, ...]
    devices: Mapping[int, Sequence[DeviceSampled]]
    began: float

    @property
    def workers(self) -> list[int]:
        """The workers that recorded anything, by rank."""
        return list(self.iterations)

    @property
    def unrecorded(self) -> int:
        """The number of workers without an iteration here, for example if each host has a separate run directory."""
        return max(max((each.workers for each in self.about.values()), default=0) - len(self.iterations), 0)

    @property
    def counted(self) -> Mapping[int, Iterations]:
        """The iterations that count: all on servers, otherwise those that every worker has finished.

        In an elastic run, those that all workers who are there last have taken part in.
        """
        if self.elastic is not None:
            last = max(done.numbers[-1] for done in self.iterations.values())
            there = {worker: _since_begun(done) for worker, done in self.iterations.items() if done.numbers[-1] == last}
            common = reduce(np.intersect1d, [done.numbers for done in there.values()])
            return {worker: done[np.isin(done.numbers, common)] for worker, done in there.items()}
        stop = min(map(len, self.iterations.values())) if self.servers is None else None
        return {worker: done[:stop] for worker, done in self.iterations.items()}

    @property
    def simulated(self) -> bool:
        """True if its time was virtual."""
        return any(about.simulated for about in self.about.values())

    @property
    def emulated(self) -> bool:
        """True if any of its workers had the speed of another device."""
        return any(about.emulated for about in self.about.values())

    @property
    def kind(self) -> str:
        """The part of the run that is not real, to add after its name; empty for a real run."""
        if self.simulated:
            return " (simulated)"
        return " (emulated devices)" if self.emulated else ""

    def wall_offset(self, writer: int | None) -> float:
        """The offset from a worker's clock to the wall clock; None: from the clock of the servers and the launcher."""
        return self.about[min(self.about) if writer is None else writer].wall_offset

    @property
    def seconds(self) -> float:
        """The end of the last iteration, in seconds since the run began."""
        return max(float((done.began + done.iteration_seconds).max()) for done in self.iterations.values())

    def since_begin(self, at: float, writer: int | None) -> float:
        """A time of a worker's clock, or of the servers and the launcher (None), since the run began; at least 0."""
        return max(0.0, at - (self.began - self.wall_offset(writer)))


@final
class RunBuilder:
    """Builds a run, at any time, from its events, which come one by one and in order for each writer.

    A worker that was restarted with the same directory counts from its last start; on servers it continued the same
    run, and all of it counts. With `keep`, only about that many of each worker's latest iterations are held, and no
    notes.
    """

    def __init__(self, *, keep: int | None = None) -> None:
        self._keep = keep
        self._about: dict[int, Run] = {}
        self._plans: dict[int, list[Planned]] = defaultdict(list)
        self._notes: dict[int, list[Noted]] = defaultdict(list)
        self._devices: dict[int, list[DeviceSampled]] = defaultdict(list)
        self._happenings: list[Happening] = []
        self._failed: dict[int, str] = {}
        self._servers, self._absences = ServerRecord(), Absences()
        self._members: MembersChanged | None = None
        self._joins = self._deaths = 0
        self._not_counted: set[int] = set()
        self.done: dict[int, IterationsBuilder] = {}

    def take(self, event: Event) -> None:
        """Add an event."""
        if isinstance(event, Run):
            self._start(event)
        elif isinstance(event, WorkerEvent) and event.worker not in self.done:
            return
        if isinstance(event, IterationDone):
            self.done[event.worker].take(event)
        else:
            self._take_other(event)

    def _take_other(self, event: Event) -> None:
        self._servers.take(event)
        self._absences.take(event)
        match event:
            case Planned():
                plans = self._plans[event.worker]
                plans.append(event)
                if self._keep is not None and len(plans) > 2 * self._keep:
                    del plans[1 : -self._keep]
            case Noted() if self._keep is None:
                self._notes[event.worker].append(event)
            case DeviceSampled() if self._keep is None:
                self._devices[event.worker].append(event)
            case WorkerFailed():
                self._failed[event.worker] = event.how
                self._deaths += 1
            case NotCounted():
                self._not_counted.add(event.iteration)
            case MembersChanged() if self._members is None or event.at > self._members.at:
                self._members = event
        if (happening := happening_of(event)) is not None:
            self._happenings.append(happening)

    def _start(self, event: Run) -> None:
        worker = event.worker
        self._about[worker] = event
        self._joins += 1
        if event.engine not in (SERVER, ELASTIC) or worker not in self.done:
            self.done[worker] = IterationsBuilder(keep=self._keep)
            self._plans[worker], self._notes[worker], self._devices[worker] = [], [], []

    def finish(self) -> RecordedRun:
        """The run so far.

        Raises:
            ConfigError: No worker has finished an iteration, or behind a barrier no iteration is in all files.
        """
        iterations = {worker: each.finish() for worker, each in self.done.items() if each.count}
        # Files are read one after the other, so the newest start is not always the one that was read last.
        newest = max(self._about.values(), key=lambda about: about.unix_seconds or 0.0, default=None)
        if newest is not None:
            iterations = {worker: done for worker, done in iterations.items() if self._is_of(newest, worker, done)}
        if newest is None or not iterations:
            raise ConfigError("no worker has finished an iteration yet: there is nothing to report")
        served, elastic = newest.engine == SERVER, newest.engine == ELASTIC
        planned = self._planned(iterations)
        if not (served or elastic):
            iterations = true_waits(iterations)
        # The wall clocks at the workers' starts relate the clocks of several hosts.
        on_wall = {worker: iterations[worker].began + self._about[worker].wall_offset for worker in sorted(iterations)}
        began = min(float(starts[0]) for starts in on_wall.values())
        seconds = max(float(done.iteration_seconds.sum()) for done in iterations.values())
        return RecordedRun(
            scheme=newest.scheme,
            global_batch_size=newest.global_batch_size,
            iterations_per_epoch=newest.iterations_per_epoch,
            iterations={worker: replace(iterations[worker], began=at - began) for worker, at in on_wall.items()},
            about=dict(self._about),
            planned=planned,
            servers=self._servers.over(seconds) if served else None,
            # Servers only see that a connection ends; a launcher that started the workers saw how they ended.
            absent={
                worker: self._failed.get(worker, why) if why == Why.ENDED else why
                for worker, why in self._absences.reasons.items()
            },
            elastic=self._elastic() if elastic else None,
            notes=tuple(note for notes in self._notes.values() for note in notes),
            happenings=tuple(self._happenings),
            devices={worker: states for worker, states in self._devices.items() if states},
            began=began,
        )

    def _elastic(self) -> ElasticRecord:
        return ElasticRecord(
            members=() if self._members is None else tuple(self._members.members),
            joins=self._joins,
            deaths=self._deaths,
            not_counted=len(self._not_counted),
        )

    def _planned(self, iterations: Mapping[int, Iterations]) -> tuple[Planned, ...]:
        """The plans that a worker recorded; on servers, the first worker that lived long enough to get any.

        If no plan has a size for each worker, there is one made of the workers' first batches.
        """
        count = max(iterations) + 1
        if self._about[min(iterations)].engine == ELASTIC:  # All of its workers tell, while they are there.
            every = sorted((plan for plans in self._plans.values() for plan in plans), key=lambda plan: plan.iteration)
            if every:
                return tuple(next(same) for _, same in groupby(every, lambda plan: list(plan.batch_sizes)))
        for worker in sorted(iterations):
            plans = tuple(plan for plan in self._plans[worker] if len(plan.batch_sizes) >= count)
            if plans:
                return plans
        first = {worker: int(done.samples[0]) for worker, done in iterations.items()}
        return (Planned(worker=min(first), batch_sizes=[first.get(worker, 0) for worker in range(count)]),)

    def _is_of(self, newest: Run, worker: int, done: Iterations) -> bool:
        """True if these iterations belong to the newest start, which may have fewer workers.

        Behind a barrier all workers start before the first iteration; on servers each starts by itself.
        """
        if newest.workers and worker >= newest.workers:
            return False
        about = self._about[worker]
        if about is newest or newest.engine in (SERVER, ELASTIC) or newest.unix_seconds is None:
            return True
        ended = done.began[-1] + done.iteration_seconds[-1] + about.wall_offset
        return bool(ended >= newest.unix_seconds)


def _since_begun(done: Iterations) -> Iterations:
    """The iterations since their numbers last began anew, as they do if all replicas end and are started again."""
    again = np.flatnonzero(np.diff(done.numbers) <= 0)
    return done[int(again[-1]) + 1 :] if len(again) else done


def recorded_run(*events: Iterable[Event]) -> RecordedRun:
    """Build the run from these events, in the order of `telemetry.read_events`.

    Raises:
        ConfigError: No worker has finished an iteration.
    """
    builder = RunBuilder()
    for event in chain.from_iterable(events):
        builder.take(event)
    return builder.finish()


def read_run(run_dir: Path) -> RecordedRun:
    """Read the run in this directory.

    Raises:
        ConfigError: There are no events, they are damaged, or no worker has finished an iteration.
    """
    return recorded_run(*(read_events(run_dir, role=role) for role in ROLES))
