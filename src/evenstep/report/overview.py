"""All the numbers of a report on a run: what its page shows, and what `evenstep report --json` prints."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from evenstep.core.account import (
    Verdict,
    long_enough,
    served_long_enough,
    served_slowdowns,
    served_verdict,
    verdict_of,
)
from evenstep.report.accounts import account_of, served_workers
from evenstep.report.clock import Times, times_of
from evenstep.report.curves import Curve, curves_of
from evenstep.report.gain import Gain, gain_of
from evenstep.report.lanes import parts_of
from evenstep.report.moves import Move, moves_of
from evenstep.report.recorded import RecordedRun
from evenstep.report.summary import RunSummary, summary_of


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOverview:
    """One worker over the whole run; `parts` are shares of its time, by `Part`, that sum to 1.

    `speed` is in samples per second of pure compute, `slowdown` its seconds per sample over the median of the
    others' at equal sizes; None where that was not measured. Lead and staleness are None without servers.
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
    largest_lead: int | None
    mean_staleness: float | None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunOverview:
    """A run and everything that is told of it; `name` is unique among the runs of a report."""

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
        """The part of all workers' time that was waiting, 0 to 1."""
        waited = sum(float(each.wait_seconds.sum()) for each in self.run.iterations.values())
        return waited / sum(float(each.iteration_seconds.sum()) for each in self.run.iterations.values())


def overview_of(name: str, run: RecordedRun) -> RunOverview:
    """The overview of a run."""
    times, summary = times_of(run), summary_of(run)
    if run.servers is None:
        account = account_of(run)
        judged = long_enough(account.iterations, account.seconds)
        verdict, speed_up = verdict_of(account, run.workers, run.scheme), account.speed_up if judged else None
        slow = {run.workers[index]: ratio for index, ratio in account.slowdowns().items()}
    else:
        workers = served_workers(run)
        judged, verdict, speed_up = served_long_enough(workers), served_verdict(workers), None
        slow = served_slowdowns(workers)
    return RunOverview(
        name=name,
        run=run,
        times=times,
        summary=summary,
        gain=gain_of(summary, speed_up),
        verdict=verdict,
        workers=tuple(_worker(run, worker, slow.get(worker) if judged else None) for worker in run.workers),
        moves=tuple(moves_of(run, times)),
        curves=tuple(curves_of(run, times)),
    )


def compared(overviews: Sequence[RunOverview]) -> str:
    """How fast several runs were beside the first of them, in one sentence."""
    first, *others = overviews
    ratios = [(each.name, each.gain.measured / first.gain.measured) for each in others]
    (name, ratio), *more = ratios
    text = f"{name} trained {ratio:.2f} times as fast as {first.name}"
    return "".join([text, *(f", {name} {ratio:.2f} times" for name, ratio in more), "."])


def _worker(run: RecordedRun, worker: int, slowdown: float | None) -> WorkerOverview:
    done = run.iterations[worker]
    seconds = {part.value: float(each.sum()) for part, each in parts_of(done).items()}
    whole = sum(seconds.values()) or 1.0
    compute = float(done.compute_seconds.sum())
    about = run.about.get(worker, {})
    return WorkerOverview(
        worker=worker,
        place=" ".join(str(about[key]) for key in ("host", "gpu") if about.get(key)),
        samples=int(done.samples.sum()),
        iterations=len(done),
        first_batch_size=run.plans[0][worker],
        last_batch_size=run.plans[-1][worker],
        speed=float(done.samples.sum()) / compute if compute else 0.0,
        slowdown=slowdown,
        parts={part: each / whole for part, each in seconds.items()},
        largest_lead=None if run.servers is None else int(np.nan_to_num(done.lead).max()),
        mean_staleness=None if run.servers is None else _mean(done.staleness),
    )


def _mean(values: Any) -> float:  # noqa: ANN401 - an array with NaN where nothing is known
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else 0.0


def _number(value: float) -> float | None:
    """As JSON has it, which has no number for what is none."""
    return float(value) if np.isfinite(value) else None


def values_of(overview: RunOverview) -> dict[str, Any]:
    """The numbers for machines: plain values that JSON can hold."""
    gain, verdict = overview.gain, overview.verdict
    return {
        "name": overview.name,
        "scheme": overview.run.scheme,
        "simulated": overview.run.simulated,
        "emulated": overview.run.emulated,
        "global_batch_size": overview.run.global_batch_size,
        "iterations": overview.summary.iterations,
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
                "seconds": overview.times.since_begin(each.at, each.writer),
                "event": each.kind,
                "worker": each.worker,
                "text": each.text,
            }
            for each in overview.run.happenings
        ],
        "noted": {each.name: {"last": _number(each.values[-1]), "count": len(each.values)} for each in overview.curves},
    }
