"""A run in a few numbers."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

from evenstep.report.iterations import Iterations
from evenstep.report.recorded import RecordedRun, read_run
from evenstep.report.served import ServedSummary, ServerRecord, summary_of_pushes


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSummary:
    """One worker; the seconds are those of its average iteration, the samples and iterations those of the whole run.

    `waiting_share` is the part of all its iterations that it waited for slower workers, 0 to 1.
    """

    worker: int
    samples: int
    iterations: int
    first_batch_size: int
    last_batch_size: int
    iteration_seconds: float
    compute_seconds: float
    wait_seconds: float
    waiting_share: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A run. `training_seconds` sums up the iterations: neither start-up nor what lies between epochs is in it.

    Behind a barrier they are the first worker's, as in the summary at the end of the run. `iterations` are those that
    every worker has finished. On servers workers take different numbers of them: it is the
    most that any has taken, `training_seconds` is the longest that any has spent, and `served` says the rest; it is
    None without servers.
    """

    scheme: str
    global_batch_size: int
    iterations: int
    training_seconds: float
    samples_per_second: float
    workers: tuple[WorkerSummary, ...]
    served: ServedSummary | None = None

    @property
    def iteration_seconds(self) -> float:
        """The average iteration, of the worker whose are the longest."""
        return max(each.iteration_seconds for each in self.workers)


def summarise(run_dir: Path) -> RunSummary:
    """The summary of the run that left its events in this directory.

    Raises:
        ConfigError: There are none, they are damaged, or no worker has finished an iteration.
    """
    return summary_of(read_run(run_dir))


def summary_of(run: RecordedRun) -> RunSummary:
    """The summary of a run, over the iterations that every worker has finished, or on servers over all."""
    if run.servers is None:
        counted = {worker: run.iterations[worker][: run.length] for worker in run.workers}
        training_seconds = _seconds(counted[run.workers[0]])
    else:
        counted = {worker: run.iterations[worker] for worker in run.workers}
        training_seconds = max(_seconds(done) for done in counted.values())
    return RunSummary(
        scheme=run.scheme,
        global_batch_size=run.global_batch_size,
        iterations=max(len(done) for done in counted.values()),
        training_seconds=training_seconds,
        samples_per_second=sum(int(done.samples.sum()) for done in counted.values()) / training_seconds,
        workers=tuple(_worker(run, worker, done) for worker, done in counted.items()),
        served=None if run.servers is None else _served(counted, run.servers, training_seconds),
    )


def _seconds(done: Iterations) -> float:
    return float(done.iteration_seconds.sum())


def _waited(done: Iterations) -> float:
    return float(done.wait_seconds.sum())


def _worker(run: RecordedRun, worker: int, done: Iterations) -> WorkerSummary:
    return WorkerSummary(
        worker=worker,
        samples=int(done.samples.sum()),
        iterations=len(done),
        first_batch_size=run.plans[0][worker],
        last_batch_size=run.plans[-1][worker],
        iteration_seconds=_seconds(done) / len(done),
        compute_seconds=float(done.compute_seconds.sum()) / len(done),
        wait_seconds=_waited(done) / len(done),
        waiting_share=_waited(done) / _seconds(done),
    )


def _served(
    counted: Mapping[int, Iterations],
    servers: ServerRecord,
    training_seconds: float,
) -> ServedSummary:
    pushes = tuple(
        summary_of_pushes(worker, [each.push for each in done if each.push is not None], _waited(done))
        for worker, done in counted.items()
    )
    return ServedSummary.of(pushes, servers, training_seconds)
