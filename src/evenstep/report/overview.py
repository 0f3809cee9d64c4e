"""All numbers of a report on a run, for its page and for `evenstep report --json`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from evenstep.report.account import (
    Interval,
    Verdict,
    missing_iterations,
    served_long_enough,
    served_slowdowns,
    served_verdict,
    verdict_of,
)
from evenstep.report.accounts import account_of, served_workers
from evenstep.report.iterations import FloatArray
from evenstep.report.recorded import RecordedRun
from evenstep.report.summary import RunSummary, summary_of
from evenstep.report.timeline import Curve, Move, Times, curves_of, moves_of, times_of


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Throughputs in samples per second.

    `measured` is the run's. `speed_up` is how many times as fast it was as with equal sizes; None if the run was too
    short to tell, and on servers. `ideal` is the sum of the workers' speeds at their sizes: no worker waits, and only
    compute takes time.
    """

    measured: float
    speed_up: Interval | None
    ideal: float

    @property
    def equal(self) -> float | None:
        """The throughput of equal sizes; None if unknown."""
        return None if self.speed_up is None else self.measured / self.speed_up.estimate

    @property
    def of_ideal(self) -> float:
        """The share of the ideal that was reached, 0 to 1."""
        return self.measured / self.ideal


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOverview:
    """One worker over the whole run; `parts` are shares of its time, by `Part`, that sum to 1.

    `speed` is in samples per second of pure compute. `slowdown` is its seconds per sample over the median of the
    others' at equal sizes, None if not measured. `cost` is what its samples cost, in average samples, and `padding` the
    share of that which is padding, 0 to 1; None if samples do not differ, or no batch is padded. Lead and staleness are
    None without servers.
    """

    worker: int
    place: str
    samples: int
    iterations: int
    first_batch_size: int
    last_batch_size: int
    speed: float
    slowdown: float | None
    parts: Mapping[str, float]
    cost: float | None
    padding: float | None
    largest_lead: int | None
    mean_staleness: float | None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunOverview:
    """A run and its numbers; `name` is unique among the runs of a report."""

    name: str
    run: RecordedRun
    times: Times
    summary: RunSummary
    gain: Gain
    verdict: Verdict
    workers: tuple[WorkerOverview, ...]
    moves: tuple[Move, ...]
    curves: tuple[Curve, ...]

    @property
    def waiting_share(self) -> float:
        """The share of all workers' time that was waiting, 0 to 1."""
        waited = sum(float(each.wait_seconds.sum()) for each in self.run.iterations.values())
        return waited / sum(float(each.iteration_seconds.sum()) for each in self.run.iterations.values())


def overview_of(name: str, run: RecordedRun) -> RunOverview:
    """The overview of a run."""
    times, summary = times_of(run), summary_of(run)
    if run.servers is None:
        account = account_of(run)
        judged = not missing_iterations(account)
        verdict, speed_up = verdict_of(account, run.workers, run.scheme), account.speed_up if judged else None
        slow = {run.workers[index]: ratio for index, ratio in account.slowdowns().items()}
        elasticities = dict(zip(run.workers, account.gain.elasticity.medians.tolist(), strict=True))
    else:
        workers = served_workers(run)
        judged, verdict, speed_up = served_long_enough(workers), served_verdict(workers), None
        slow, elasticities = served_slowdowns(workers), dict.fromkeys(run.workers, 1.0)
    computing = [each for each in summary.workers if each.compute_seconds]
    ideal = sum(each.samples / (each.compute_seconds * each.iterations) for each in computing)
    return RunOverview(
        name=name,
        run=run,
        times=times,
        summary=summary,
        gain=Gain(measured=summary.samples_per_second, speed_up=speed_up, ideal=ideal),
        verdict=verdict,
        workers=_workers(run, summary, slow if judged else {}),
        moves=tuple(moves_of(run, times, elasticities)),
        curves=tuple(curves_of(run, times)),
    )


def compared(overviews: Sequence[RunOverview]) -> str:
    """How fast several runs were compared with the first, in one sentence."""
    first, *others = overviews
    ratios = [(each.name, each.gain.measured / first.gain.measured) for each in others]
    (name, ratio), *more = ratios
    text = f"{name} trained {ratio:.2f} times as fast as {first.name}"
    return "".join([text, *(f", {name} {ratio:.2f} times" for name, ratio in more), "."])


def _workers(run: RecordedRun, summary: RunSummary, slow: Mapping[int, float]) -> tuple[WorkerOverview, ...]:
    pushes = {} if summary.served is None else {each.worker: each for each in summary.served.pushes}
    workers = []
    for each in summary.workers:
        done, about, pushed = run.iterations[each.worker], run.about[each.worker], pushes.get(each.worker)
        seconds = {part.value: float(column.sum()) for part, column in done.parts.items()}
        whole, compute = sum(seconds.values()) or 1.0, float(done.compute_seconds.sum())
        worker = WorkerOverview(
            worker=each.worker,
            place=" ".join(name for name in (about.host, about.gpu) if name),
            samples=int(done.samples.sum()),
            iterations=len(done),
            first_batch_size=each.first_batch_size,
            last_batch_size=each.last_batch_size,
            speed=float(done.samples.sum()) / compute if compute else 0.0,
            slowdown=slow.get(each.worker),
            parts={part: taken / whole for part, taken in seconds.items()},
            cost=(cost := _sum(done.cost)),
            padding=None if not cost or (padding := _sum(done.padding)) is None else padding / cost,
            largest_lead=None if pushed is None else pushed.largest_lead,
            mean_staleness=None if pushed is None else pushed.mean_staleness,
        )
        workers.append(worker)
    return tuple(workers)


def _sum(column: FloatArray) -> float | None:
    """The sum of what is known; None if nothing is."""
    known = column[np.isfinite(column)]
    return float(known.sum()) if len(known) else None


def _number(value: float) -> float | None:
    """The value for JSON, which has no NaN."""
    return float(value) if np.isfinite(value) else None


def values_of(overview: RunOverview) -> dict[str, Any]:
    """The numbers as plain values that JSON can hold."""
    gain, verdict = overview.gain, overview.verdict
    return {
        "name": overview.name,
        "scheme": overview.run.scheme,
        "simulated": overview.run.simulated,
        "emulated": overview.run.emulated,
        "global_batch_size": overview.run.global_batch_size,
        "iterations": overview.summary.iterations,
        "unrecorded_workers": overview.run.unrecorded,
        "training_seconds": overview.summary.training_seconds,
        "samples_per_second": gain.measured,
        "waiting_share": overview.waiting_share,
        "equal_samples_per_second": gain.equal,
        "ideal_samples_per_second": gain.ideal,
        "speed_up_over_equal": None if gain.speed_up is None else gain.speed_up.estimate,
        "speed_up_interval": None if gain.speed_up is None else [gain.speed_up.low, gain.speed_up.high],
        "of_ideal": gain.of_ideal,
        "verdict": {
            "worker": verdict.worker,
            "cause": None if verdict.cause is None else verdict.cause.value,
            "slowdown": verdict.slowdown,
            "cost": verdict.cost,
            "text": verdict.text,
        },
        "workers": [{name: getattr(each, name) for name in WorkerOverview.__slots__} for each in overview.workers],
        "size_changes": [{name: getattr(each, name) for name in Move.__slots__} for each in overview.moves],
        "events": [
            {
                "seconds": overview.times.since_begin(each.event.at, each.writer),
                "event": each.event.kind,
                "worker": each.worker,
                "text": each.text,
            }
            for each in overview.run.happenings
        ],
        "noted": {each.name: {"last": _number(each.values[-1]), "count": len(each.values)} for each in overview.curves},
    }
