"""A run in a few numbers."""

from dataclasses import dataclass
from pathlib import Path
from typing import final

from evenstep.report.recorded import RecordedRun, read_run


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSummary:
    """One worker; the seconds are those of its average iteration, the samples those of the whole run.

    `waiting_share` is the part of all its iterations that it waited for slower workers, 0 to 1.
    """

    worker: int
    samples: int
    first_batch_size: int
    last_batch_size: int
    iteration_seconds: float
    compute_seconds: float
    wait_seconds: float
    waiting_share: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A run. `training_seconds` sums up the iterations: neither start-up nor what lies between epochs is in it."""

    scheme: str
    global_batch_size: int
    iterations: int
    training_seconds: float
    samples_per_second: float
    workers: tuple[WorkerSummary, ...]

    @property
    def iteration_seconds(self) -> float:
        """The average iteration."""
        return self.training_seconds / self.iterations


def summarise(run_dir: Path) -> RunSummary:
    """The summary of the run that left its events in this directory.

    Raises:
        ConfigError: There are none, they are damaged, or no worker has finished an iteration.
    """
    return summary_of(read_run(run_dir))


def summary_of(run: RecordedRun) -> RunSummary:
    """The summary of a run, over the iterations that every worker has finished."""
    workers = tuple(_worker(run, worker) for worker in run.workers)
    training_seconds = max(each.iteration_seconds for each in workers) * run.length
    return RunSummary(
        scheme=run.scheme,
        global_batch_size=run.global_batch_size,
        iterations=run.length,
        training_seconds=training_seconds,
        samples_per_second=sum(each.samples for each in workers) / training_seconds,
        workers=workers,
    )


def _worker(run: RecordedRun, worker: int) -> WorkerSummary:
    done = run.iterations[worker][: run.length]
    total = sum(each.iteration_seconds for each in done)
    waited = sum(each.wait_seconds for each in done)
    return WorkerSummary(
        worker=worker,
        samples=sum(each.samples for each in done),
        first_batch_size=run.plans[0][worker],
        last_batch_size=run.plans[-1][worker],
        iteration_seconds=total / len(done),
        compute_seconds=sum(each.compute_seconds for each in done) / len(done),
        wait_seconds=waited / len(done),
        waiting_share=waited / total,
    )
