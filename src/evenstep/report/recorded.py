"""The events of a run directory as values, worker by worker."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

from evenstep.core.errors import ConfigError
from evenstep.core.values import Basis
from evenstep.report.happened import Happening, happening_of
from evenstep.report.iterations import BASES, Iterations, IterationsBuilder
from evenstep.report.lateness import true_waits
from evenstep.report.served import ServerRecord
from evenstep.report.told import Told
from evenstep.telemetry import Role, read_events

SERVER: Final = "server"
"""The engine of a run on parameter servers, as the event `run` names it; an event that names none is of another."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everybody's batch sizes, from this iteration of the worker that wrote it down, and why they are what they are."""

    iteration: int
    batch_sizes: tuple[int, ...]
    basis: Basis = "speed"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """A run: `iterations[worker]` in order; `plans` are everybody's decided batch sizes, each time that they changed.

    `servers` is what parameter servers wrote down; None for a run without any. On servers, workers take different
    numbers of iterations. `told` is what the script noted down,
    `happenings` what is worth a line each, `about[worker]` the event with which each began; `planned` are the plans
    with the iterations from which they held. `failed` says of workers whose processes failed how they did.
    """

    scheme: str
    global_batch_size: int
    iterations_per_epoch: int
    iterations: Mapping[int, Iterations]
    plans: tuple[tuple[int, ...], ...]
    servers: ServerRecord | None = None
    planned: tuple[Plan, ...] = ()
    told: Told = field(default_factory=Told)
    happenings: tuple[Happening, ...] = ()
    about: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    failed: Mapping[int, str] = field(default_factory=dict)

    @property
    def workers(self) -> list[int]:
        """The workers that recorded anything, in the order of their ranks."""
        return sorted(self.iterations)

    @property
    def length(self) -> int:
        """The iterations that every worker has finished."""
        return min(len(done) for done in self.iterations.values())

    @property
    def simulated(self) -> bool:
        """Whether its time was virtual."""
        return any(about.get("simulated", False) for about in self.about.values())

    @property
    def emulated(self) -> bool:
        """Whether any of its workers had the speed of another device."""
        return any(about.get("emulated", False) for about in self.about.values())

    @property
    def kind(self) -> str:
        """What is said behind its name of what is not real about it; empty where all is."""
        if self.simulated:
            return " (simulated)"
        return " (emulated devices)" if self.emulated else ""


@final
class RunBuilder:
    """Takes the events of a run one by one, each worker's in their order, and says at any time what the run is.

    A worker that was started again into the same directory counts from its last start; on servers it went on with the
    same run, and all of it counts. With `keep`, only about so many of each worker's latest iterations are held,
    and nothing that was noted.
    """

    def __init__(self, *, keep: int | None = None) -> None:
        self._keep = keep
        self._run: Mapping[str, Any] = {}
        self._about: dict[int, Mapping[str, Any]] = {}
        self._plans: dict[int, list[Plan]] = {}
        self._happenings: list[Happening] = []
        self._failed: dict[int, str] = {}
        self._told: dict[int, list[Mapping[str, Any]]] = {}
        self._server_events: list[Mapping[str, Any]] = []
        self.done: dict[int, IterationsBuilder] = {}

    @property
    def served(self) -> bool:
        """Whether the run is on parameter servers."""
        return self._run.get("engine") == SERVER

    def take(self, event: Mapping[str, Any]) -> None:
        """Add an event of a worker.

        Raises:
            KeyError: It lacks what every version has written.
            TypeError, ValueError: It is damaged.
        """
        kind = event["event"]
        worker = event.get("worker", self._run.get("worker"))
        if kind == "run":
            self._begin(event)
        elif worker not in self.done:
            return
        elif kind == "iteration":
            self.done[worker].take(event)
        elif kind == "plan":
            self._plan(worker, event)
        elif kind == "note":
            _require_numbers(event, "iteration", "at", "samples")
            _require_numbers(event["values"], *(name for name, value in event["values"].items() if value is not None))
            if self._keep is None:
                self._told[worker].append(event)
        self._happen(event, worker)

    def take_server(self, event: Mapping[str, Any]) -> None:
        """Add an event of a server.

        Raises:
            KeyError, TypeError, ValueError: As `take`.
        """
        if event["event"] in _COUNTED:
            _require_numbers(event, *_COUNTED[event["event"]])
            self._server_events.append(event)
        self._happen(event)

    def take_launcher(self, event: Mapping[str, Any]) -> None:
        """Add an event of the launcher."""
        if event["event"] == "worker_failed":
            self._failed[event["worker"]] = event["how"]
        self._happen(event)

    def finish(self) -> RecordedRun:
        """The run as far as it has been told.

        Raises:
            ConfigError: No worker has finished an iteration.
        """
        # Files are read one after the other, so the newest start is not the last one that was read.
        newest = max(self._about.values(), key=lambda about: about.get("unix_seconds", 0.0), default={})
        served = newest.get("engine") == SERVER
        iterations = {worker: each.finish() for worker, each in self.done.items() if each.count}
        iterations = {worker: done for worker, done in iterations.items() if self._is_of(newest, worker, done)}
        if not iterations:
            raise ConfigError("no worker has finished an iteration yet: there is nothing to report")
        missing = [name for name in ("scheme", "global_batch_size", "iterations_per_epoch") if name not in newest]
        if missing:
            raise ConfigError(f"an event 'run' has no {missing[0]!r}: it was written by another version of evenstep")
        planned = self._planned(iterations)
        decided = [plan for plan in planned if plan.basis != "comparison"]
        return RecordedRun(
            scheme=newest["scheme"],
            global_batch_size=newest["global_batch_size"],
            iterations_per_epoch=newest["iterations_per_epoch"],
            iterations=iterations if served else true_waits(iterations),
            plans=tuple(plan.batch_sizes for plan in decided),
            servers=ServerRecord.from_events(self._server_events) if served else None,
            planned=planned,
            told=Told.from_events(self._told),
            happenings=tuple(self._happenings),
            failed=dict(self._failed),
            about=dict(self._about),
        )

    def _planned(self, iterations: Mapping[int, Iterations]) -> tuple[Plan, ...]:
        """The plans that a worker wrote down, on servers the first that lived until it was told any.

        Without any that says a size for each worker there is one, of what each computed on first.
        """
        count = max(iterations) + 1
        for worker in sorted(iterations):
            plans = tuple(plan for plan in self._plans[worker] if len(plan.batch_sizes) >= count)
            if plans:
                return plans
        first = {worker: int(done.samples[0]) for worker, done in iterations.items()}
        return (Plan(iteration=0, batch_sizes=tuple(first.get(worker, 0) for worker in range(count))),)

    def _is_of(self, newest: Mapping[str, Any], worker: int, done: Iterations) -> bool:
        """Whether these iterations are of the newest start, which may be one of fewer workers.

        Behind a barrier all begin an iteration after all have started; on servers everyone starts for themselves.
        """
        if worker >= newest.get("workers", worker + 1):
            return False
        about = self._about[worker]
        if about is newest or newest.get("engine") == SERVER or "unix_seconds" not in newest:
            return True
        ended = done.began[-1] + done.iteration_seconds[-1] + wall_offset(about)
        return not ended < newest["unix_seconds"]  # Where it is not known, it is taken to be.

    def _plan(self, worker: int, event: Mapping[str, Any]) -> None:
        plans = self._plans[worker]
        basis = BASES[BASES.index(event.get("basis", "speed"))]
        plan = Plan(iteration=event.get("iteration", 0), batch_sizes=tuple(event["batch_sizes"]), basis=basis)
        plans.append(plan)
        if self._keep is not None and len(plans) > 2 * self._keep:
            del plans[1 : -self._keep]

    def _begin(self, event: Mapping[str, Any]) -> None:
        worker = event["worker"]
        _require_numbers(event, "worker", *(name for name in _RUN_NUMBERS if name in event))
        self._run = event
        self._about[worker] = event
        if not self.served or worker not in self.done:
            self.done[worker] = IterationsBuilder(served=self.served, keep=self._keep)
            self._plans[worker], self._told[worker] = [], []

    def _happen(self, event: Mapping[str, Any], writer: int | None = None) -> None:
        happening = happening_of(event, writer=writer)
        if happening is not None:
            self._happenings.append(happening)


def wall_offset(about: Mapping[str, Any]) -> float:
    """What to add to a worker's clock to have the wall clock's seconds, from the event with which it began.

    0 where that does not say, as in a simulation, whose workers share one clock.
    """
    if "unix_seconds" not in about or "at" not in about:
        return 0.0
    return float(about["unix_seconds"] - about["at"])


_RUN_NUMBERS: Final = ("global_batch_size", "iterations_per_epoch", "workers", "at", "unix_seconds")
_COUNTED: Final = {
    "tally": ("commits", "bytes", "samples"),
    "begin": ("worker", "number"),
    "join": ("worker", "at"),
    "leave": ("worker", "at"),
}
"""What is needed of the events of servers that are kept, and which numbers of them."""


def _require_numbers(event: Mapping[str, Any], *names: str) -> None:
    """Check now what will be used later, so that it can be said which event is damaged.

    Raises:
        KeyError: One is missing.
        TypeError: One is no number.
    """
    for name in names:
        if not isinstance(event[name], int | float):
            raise TypeError(f"{name!r} is no number")


def recorded_run(
    events: Iterable[Mapping[str, Any]],
    server_events: Iterable[Mapping[str, Any]] = (),
    launcher_events: Iterable[Mapping[str, Any]] = (),
) -> RecordedRun:
    """The run that these events tell of, in the order in which `telemetry.read_events` gives them.

    Raises:
        ConfigError: No worker has finished an iteration.
    """
    builder = RunBuilder()
    for event in events:
        builder.take(event)
    for event in server_events:
        builder.take_server(event)
    for event in launcher_events:
        builder.take_launcher(event)
    return builder.finish()


def read_run(run_dir: Path, *, progress: Callable[[int], None] | None = None) -> RecordedRun:
    """The run that left its events in this directory; `progress` is told now and then how many bytes more were read.

    Raises:
        ConfigError: There are none, they are damaged, or no worker has finished an iteration.
    """
    builder = RunBuilder()
    takers: tuple[tuple[Role, Callable[[Mapping[str, Any]], None]], ...] = (
        ("worker", builder.take),
        ("server", builder.take_server),
        ("launcher", builder.take_launcher),
    )
    for role, take in takers:
        for event in read_events(run_dir, role=role, progress=progress):
            try:
                take(event)
            except KeyError as error:
                raise ConfigError(
                    f"an event in {run_dir} has no {error}: it was written by another version of evenstep, use that one"
                ) from error
            except (AttributeError, TypeError, ValueError) as error:
                raise ConfigError(
                    f"an event {event['event']!r} in {run_dir} is damaged ({error}): delete its line or mend it"
                ) from error
    return builder.finish()
