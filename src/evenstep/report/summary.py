"""A run in numbers that JSON can hold, for the terminal, the page and `--json`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np

from evenstep.report.account.account import Part
from evenstep.report.account.gain import Interval
from evenstep.report.account.verdict import Verdict
from evenstep.report.conclusions import Conclusions, conclusions_of
from evenstep.report.iterations import FloatArray, Iterations, joined
from evenstep.report.recorded import ElasticRecord, RecordedRun, ServerRecord, read_run


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PushSummary:
    """One worker's pushes: staleness in versions, `behind` in global batches, and its largest lead in iterations.

    `committed` counts pushes of which any sample was committed; if there are none, staleness is 0.
    """

    committed: int
    mean_staleness: float
    largest_staleness: int
    mean_behind: float
    largest_behind: float
    largest_lead: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSummary:
    """One worker over all of its iterations.

    Attributes:
        worker: Its rank.
        place: Its host and GPU, as far as known.
        samples: The samples of all iterations.
        iterations: The number of iterations.
        first_batch_size: The first size that was planned for it.
        last_batch_size: The last size that was planned for it.
        iteration_seconds: Seconds of an average iteration.
        compute_seconds: Seconds of compute in an average iteration.
        wait_seconds: Seconds of waiting for slower workers in an average iteration.
        parts: Shares of its time by `Part`, which sum to 1.
        samples_per_second: Its throughput over all of its time.
        speed: Samples per second of pure compute; 0 if it computed nothing.
        slowdown: Its seconds per sample over the median of the others', at equal sizes; None if not measured.
        cost: The cost of its samples, in average samples; None if all samples cost the same.
        padding: The share of padding in the cost, 0 to 1; None if no batch is padded.
        pushes: Its pushes to servers; None without servers.
    """

    worker: int
    place: str
    samples: int
    iterations: int
    first_batch_size: int
    last_batch_size: int
    iteration_seconds: float
    compute_seconds: float
    wait_seconds: float
    parts: Mapping[str, float]
    samples_per_second: float
    speed: float
    slowdown: float | None
    cost: float | None
    padding: float | None
    pushes: PushSummary | None

    @property
    def waiting_share(self) -> float:
        """The share of its time spent waiting for slower workers, 0 to 1."""
        return self.parts[Part.WAIT.value]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A run.

    Attributes:
        scheme: The name of its scheme.
        simulated: Whether its time was virtual.
        emulated: Whether any of its workers had the speed of another device.
        global_batch_size: In samples.
        unrecorded_workers: The number of workers without an iteration here.
        iterations: The number that every worker has finished; on servers, the most of any worker.
        training_seconds: The sum of these iterations, without the start of the run and the time between epochs: behind
            a barrier the first worker's, on servers the most of any worker. In an elastic run, all seconds from the
            begin of the first iteration to the end of the last.
        samples_per_second: All workers' samples in that time.
        ideal_samples_per_second: The sum of the workers' speeds: no worker waits, and only compute takes time.
        of_ideal: The share of the ideal that was reached, 0 to 1.
        over_equal_sizes: The factor by which it was faster than with equal sizes; None if it was too short to tell,
            and on servers.
        equal_samples_per_second: The throughput of equal sizes; None if unknown.
        waiting_share: The share of all workers' time spent waiting, 0 to 1.
        verdict: Which worker is slow, why, and the cost of that.
        workers: The workers by rank.
        served: The work of parameter servers; None without servers.
        elastic: Who came and went; None for a run whose workers do not.
    """

    scheme: str
    simulated: bool
    emulated: bool
    global_batch_size: int
    unrecorded_workers: int
    iterations: int
    training_seconds: float
    samples_per_second: float
    ideal_samples_per_second: float
    of_ideal: float
    over_equal_sizes: Interval | None
    equal_samples_per_second: float | None
    waiting_share: float
    verdict: Verdict
    workers: tuple[WorkerSummary, ...]
    served: ServerRecord | None
    elastic: ElasticRecord | None

    @property
    def iteration_seconds(self) -> float:
        """The longest average iteration of any worker."""
        return max(each.iteration_seconds for each in self.workers)


def summarise(run_dir: Path) -> RunSummary:
    """The summary of the run in this directory.

    Raises:
        ConfigError: There are no events, they are damaged, or no worker has finished an iteration.
    """
    return summary_of(read_run(run_dir))


def summary_of(run: RecordedRun, concluded: Conclusions | None = None) -> RunSummary:
    """The summary of a run; its conclusions are computed unless they are given."""
    concluded = concluded or conclusions_of(run)
    counted = run.counted if run.elastic is None else run.iterations
    seconds = [float(done.iteration_seconds.sum()) for done in counted.values()]
    training_seconds, iterations = seconds[0] if run.servers is None else max(seconds), max(map(len, counted.values()))
    if run.elastic is not None:  # The time in which a step did not count belongs to no iteration.
        iterations, training_seconds = len(np.unique(joined(counted.values()).numbers)), run.seconds
    samples_per_second = sum(int(done.samples.sum()) for done in counted.values()) / training_seconds
    workers = tuple(worker_summary(run, worker, concluded.slowdowns.get(worker)) for worker in run.workers)
    ideal = sum(each.speed for each in workers)
    speed_up, everyone = concluded.speed_up, run.iterations.values()
    return RunSummary(
        scheme=run.scheme,
        simulated=run.simulated,
        emulated=run.emulated,
        global_batch_size=run.global_batch_size,
        unrecorded_workers=run.unrecorded,
        iterations=iterations,
        training_seconds=training_seconds,
        samples_per_second=samples_per_second,
        ideal_samples_per_second=ideal,
        of_ideal=samples_per_second / ideal if ideal else 0.0,
        over_equal_sizes=speed_up,
        equal_samples_per_second=None if speed_up is None else samples_per_second / speed_up.estimate,
        waiting_share=float(sum(each.wait_seconds.sum() for each in everyone))
        / float(sum(each.iteration_seconds.sum() for each in everyone)),
        verdict=concluded.verdict,
        workers=workers,
        served=run.servers,
        elastic=run.elastic,
    )


def speed_ups(runs: Sequence[RunSummary]) -> list[float]:
    """The speed of each run relative to the first."""
    return [run.samples_per_second / runs[0].samples_per_second for run in runs]


def worker_summary(run: RecordedRun, worker: int, slowdown: float | None = None) -> WorkerSummary:
    """The summary of a worker of a run."""
    done, about = run.iterations[worker], run.about[worker]
    parts = {part.value: float(column.sum()) for part, column in done.parts.items()}
    samples, seconds, compute = int(done.samples.sum()), float(done.iteration_seconds.sum()), parts[Part.COMPUTE.value]
    cost, padding, whole = _sum(done.cost), _sum(done.padding), sum(parts.values()) or 1.0
    return WorkerSummary(
        worker=worker,
        place=" ".join(name for name in (about.host, about.gpu) if name),
        samples=samples,
        iterations=len(done),
        first_batch_size=run.planned[0].batch_sizes[worker],
        last_batch_size=run.planned[-1].batch_sizes[worker],
        iteration_seconds=seconds / len(done),
        compute_seconds=compute / len(done),
        wait_seconds=parts[Part.WAIT.value] / len(done),
        parts={part: taken / whole for part, taken in parts.items()},
        samples_per_second=samples / seconds if seconds else 0.0,
        speed=samples / compute if compute else 0.0,
        slowdown=slowdown,
        cost=cost,
        padding=None if not cost or padding is None else padding / cost,
        pushes=None if run.servers is None else _pushes(done),
    )


def _sum(column: FloatArray) -> float | None:
    """The sum of the known values; None if there are none."""
    known = column[np.isfinite(column)]
    return float(known.sum()) if len(known) else None


def _pushes(done: Iterations) -> PushSummary:
    staleness, behind, lead = (_known(each) for each in (done.staleness, done.behind, done.lead))
    return PushSummary(
        committed=int(np.isfinite(done.staleness).sum()),
        mean_staleness=float(staleness.mean()),
        largest_staleness=int(staleness.max()),
        mean_behind=float(behind.mean()),
        largest_behind=float(behind.max()),
        largest_lead=int(lead.max()),
    )


def _known(values: FloatArray) -> FloatArray:
    """The known values, or a zero."""
    known = values[np.isfinite(values)]
    return known if len(known) else np.zeros(1)
