"""All the numbers of a report on a run: what its page shows, and what `evenstep report --json` prints."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from evenstep.report.clock import Times, times_of
from evenstep.report.curves import Curve, curves_of
from evenstep.report.gain import Gain, gain_of
from evenstep.report.lanes import parts_of
from evenstep.report.moves import Move, moves_of
from evenstep.report.recorded import RecordedRun
from evenstep.report.summary import RunSummary, summary_of
from evenstep.report.verdict import Verdict, slowness, verdict_of


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOverview:
    """One worker over the whole run; `parts` are shares of its time, by `Part`, that sum to 1.

    `speed` is in samples per second of pure compute, `slowdown` its seconds per sample over the median of the
    others' (both 0 for one that computed on nothing of its own). Lead and staleness are None without servers.
    """

    worker: int
    place: str
    samples: int
    iterations: int
    first_batch_size: int
    last_batch_size: int
    speed: float
    slowdown: float
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
    gain: Gain | None
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
    times, summary, slow = times_of(run), summary_of(run), slowness(run)
    return RunOverview(
        name=name,
        run=run,
        times=times,
        summary=summary,
        gain=gain_of(run),
        verdict=verdict_of(run),
        workers=tuple(_worker(run, worker, slow.get(worker, 0.0)) for worker in run.workers),
        moves=tuple(moves_of(run, times)),
        curves=tuple(curves_of(run, times)),
    )


def _worker(run: RecordedRun, worker: int, slowdown: float) -> WorkerOverview:
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
        "samples_per_second": overview.summary.samples_per_second,
        "waiting_share": overview.waiting_share,
        "equal_samples_per_second": None if gain is None else gain.equal,
        "ideal_samples_per_second": None if gain is None else gain.ideal,
        "speed_up_over_equal": None if gain is None else gain.speed_up,
        "of_ideal": None if gain is None else gain.of_ideal,
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
