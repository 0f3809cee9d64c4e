"""The events of a run directory as values, worker by worker."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, final

from evenstep.core.errors import ConfigError
from evenstep.report.served import DivergenceRecord, PushRecord, ServerRecord
from evenstep.telemetry import read_events

SERVER: Final = "server"
"""The engine of a run on parameter servers, as the event `run` names it; an event that names none is of another."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One iteration as one worker saw it; the parts in seconds, in the order in which they happened.

    `number` counts from 0 over the whole run. Input, compute, waiting and communication make up the iteration, but for
    what the script itself does in between. On servers `wait_seconds` is how long the push was held, and `push` what
    they told of it.
    """

    number: int
    samples: int
    iteration_seconds: float
    input_seconds: float
    compute_seconds: float
    wait_seconds: float
    comm_seconds: float
    push: PushRecord | None = None

    @classmethod
    def from_event(cls, event: Mapping[str, Any], *, served: bool = False) -> Self:
        """From an event `iteration`, of a run on servers or not."""
        return cls(
            number=event["iteration"],
            samples=event["samples"],
            iteration_seconds=event["iteration_seconds"],
            input_seconds=event["input_seconds"],
            compute_seconds=event["compute_seconds"],
            wait_seconds=event["wait_seconds"],
            comm_seconds=event["comm_seconds"],
            push=PushRecord.from_event(event) if served else None,
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """A run: `iterations[worker]` in order; `plans` are everybody's batch sizes, each time that they changed.

    `servers` is what parameter servers wrote down; None for a run without any. On servers, workers take different
    numbers of iterations, and may take their training to be `diverging`.
    """

    scheme: str
    global_batch_size: int
    iterations_per_epoch: int
    iterations: Mapping[int, tuple[Iteration, ...]]
    plans: tuple[tuple[int, ...], ...]
    servers: ServerRecord | None = None
    diverging: tuple[DivergenceRecord, ...] = ()

    @property
    def workers(self) -> list[int]:
        """The workers that recorded anything, in the order of their ranks."""
        return sorted(self.iterations)

    @property
    def length(self) -> int:
        """The iterations that every worker has finished."""
        return min(len(done) for done in self.iterations.values())


def recorded_run(events: Iterable[Mapping[str, Any]], server_events: Iterable[Mapping[str, Any]] = ()) -> RecordedRun:
    """The run that these events tell of, in the order in which `telemetry.read_events` gives them.

    A worker that was started again into the same directory counts from its last start; on servers it went on with the
    same run, and all of it counts.

    Raises:
        ConfigError: No worker has finished an iteration.
    """
    run: Mapping[str, Any] = {}
    served = False
    done: dict[int, list[Iteration]] = {}
    plans: dict[int, list[tuple[int, ...]]] = {}
    diverging: list[DivergenceRecord] = []
    for event in events:
        if event["event"] == "run":
            run, served = event, event.get("engine") == SERVER
            if not served or run["worker"] not in done:
                done[run["worker"]], plans[run["worker"]] = [], []
        elif event["event"] == "plan" and run:
            plans[run["worker"]].append(tuple(event["batch_sizes"]))
        elif event["event"] == "iteration" and run:
            done[run["worker"]].append(Iteration.from_event(event, served=served))
        elif event["event"] == "diverging" and run:
            diverging.append(DivergenceRecord(worker=event["worker"], since=event["since"]))
    if not any(done.values()):
        raise ConfigError("no worker has finished an iteration yet: there is nothing to report")
    return RecordedRun(
        scheme=run["scheme"],
        global_batch_size=run["global_batch_size"],
        iterations_per_epoch=run["iterations_per_epoch"],
        iterations={worker: tuple(iterations) for worker, iterations in done.items() if iterations},
        # On servers the first worker may have died before it was told any.
        plans=tuple(next((plans[worker] for worker in sorted(plans) if plans[worker]), [])),
        servers=ServerRecord.from_events(server_events) if served else None,
        diverging=tuple(diverging),
    )


def read_run(run_dir: Path) -> RecordedRun:
    """The run that left its events in this directory.

    Raises:
        ConfigError: There are none, they are damaged, or no worker has finished an iteration.
    """
    try:
        return recorded_run(read_events(run_dir), read_events(run_dir, role="server"))
    except KeyError as error:
        raise ConfigError(
            f"an event in {run_dir} has no {error}: it was written by another version of evenstep, use that one"
        ) from error
