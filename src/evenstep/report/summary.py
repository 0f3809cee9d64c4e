"""A run in a few numbers."""

from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np

from evenstep.report.account import Account
from evenstep.report.iterations import FloatArray, Iterations
from evenstep.report.recorded import RecordedRun, ServerRecord, read_run
from evenstep.telemetry.events import Left


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSummary:
    """One worker: `samples` and `iterations` of the whole run, seconds of its average iteration.

    `waiting_share` is the share of its time that it waited for slower workers, 0 to 1.
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
class PushSummary:
    """One worker's pushes: staleness in versions, `behind` in global batches, and its largest lead in iterations.

    `committed` pushes are those of which any sample was committed; without any, staleness is 0.
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
    """A worker that left."""

    worker: int
    why: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ServedSummary:
    """What the servers did, and how stale the pushes were.

    `bytes_per_second` are gradients that reached the first server. Rates are over the `training_seconds` of the run.
    All are 0 if the servers' events are not in the run directory.
    """

    pushes: tuple[PushSummary, ...]
    commits: int
    commits_per_second: float
    bytes_per_second: float
    samples_committed: int
    joins: int
    leaves: tuple[Leave, ...]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A run. `training_seconds` is the sum of its iterations, without its start and without what lies between epochs.

    Behind a barrier the seconds are the first worker's, and `iterations` those that every worker has finished. On
    servers, where workers take different numbers of iterations, both are the most of any worker, and `served` has more.
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
        """The average iteration of the worker that takes longest."""
        return max(each.iteration_seconds for each in self.workers)


def summarise(run_dir: Path) -> RunSummary:
    """The summary of the run in this directory.

    Raises:
        ConfigError: There are no events, they are damaged, or no worker has finished an iteration.
    """
    return summary_of(read_run(run_dir))


def summary_of(run: RecordedRun) -> RunSummary:
    """The summary of a run, over the iterations that every worker has finished, or on servers over all."""
    counted, plans = run.counted, run.plans
    seconds = [float(done.iteration_seconds.sum()) for done in counted.values()]
    training_seconds = seconds[0] if run.servers is None else max(seconds)
    return RunSummary(
        scheme=run.scheme,
        global_batch_size=run.global_batch_size,
        iterations=max(len(done) for done in counted.values()),
        training_seconds=training_seconds,
        samples_per_second=sum(int(done.samples.sum()) for done in counted.values()) / training_seconds,
        workers=tuple(_worker(worker, done, plans[0][worker], plans[-1][worker]) for worker, done in counted.items()),
        served=None if run.servers is None else _served(run, run.servers, training_seconds),
    )


def summary_of_account(account: Account, scheme: str) -> RunSummary:
    """The summary of a run behind a barrier that is known by its totals."""
    numbers = zip(account.samples, account.first_sizes, account.last_sizes, account.own[0], account.wait, strict=True)
    workers = (
        WorkerSummary(
            worker=worker,
            samples=int(samples),
            iterations=account.iterations,
            first_batch_size=first,
            last_batch_size=last,
            iteration_seconds=account.seconds / account.iterations,
            compute_seconds=float(compute) / account.iterations,
            wait_seconds=float(wait) / account.iterations,
            waiting_share=float(wait) / account.seconds,
        )
        for worker, (samples, first, last, compute, wait) in enumerate(numbers)
    )
    return RunSummary(
        scheme=scheme,
        global_batch_size=sum(account.last_sizes),
        iterations=account.iterations,
        training_seconds=account.seconds,
        samples_per_second=float(account.samples.sum()) / account.seconds,
        workers=tuple(workers),
    )


def _worker(worker: int, done: Iterations, first_batch_size: int, last_batch_size: int) -> WorkerSummary:
    seconds, waited = float(done.iteration_seconds.sum()), float(done.wait_seconds.sum())
    return WorkerSummary(
        worker=worker,
        samples=int(done.samples.sum()),
        iterations=len(done),
        first_batch_size=first_batch_size,
        last_batch_size=last_batch_size,
        iteration_seconds=seconds / len(done),
        compute_seconds=float(done.compute_seconds.sum()) / len(done),
        wait_seconds=waited / len(done),
        waiting_share=waited / seconds,
    )


def _served(run: RecordedRun, servers: ServerRecord, training_seconds: float) -> ServedSummary:
    leaves = [each for each in servers.attendance if isinstance(each, Left)]
    return ServedSummary(
        pushes=tuple(_pushes(worker, done) for worker, done in run.counted.items()),
        commits=servers.commits,
        commits_per_second=servers.commits / training_seconds,
        bytes_per_second=servers.bytes / training_seconds,
        samples_committed=servers.samples,
        joins=len(servers.attendance) - len(leaves),
        leaves=tuple(Leave(worker=each.worker, why=each.why) for each in leaves),
    )


def _pushes(worker: int, done: Iterations) -> PushSummary:
    staleness, behind, lead = (_known(each) for each in (done.staleness, done.behind, done.lead))
    return PushSummary(
        worker=worker,
        committed=int(np.isfinite(done.staleness).sum()),
        mean_staleness=float(staleness.mean()),
        largest_staleness=int(staleness.max()),
        mean_behind=float(behind.mean()),
        largest_behind=float(behind.max()),
        largest_lead=int(lead.max()),
        total_wait_seconds=float(done.wait_seconds.sum()),
    )


def _known(values: FloatArray) -> FloatArray:
    """The values that are known, or a zero."""
    known = values[np.isfinite(values)]
    return known if len(known) else np.zeros(1)
