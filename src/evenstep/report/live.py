"""How a run is doing right now, in a few numbers per worker: what `evenstep top` shows."""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, final

import numpy as np

from evenstep.core.account import Verdict, duration, served_verdict, verdict_of
from evenstep.core.errors import ConfigError
from evenstep.core.supervision import Why
from evenstep.report.accounts import account_of, served_workers
from evenstep.report.happened import Happening
from evenstep.report.iterations import Iterations
from evenstep.report.recorded import RecordedRun, RunBuilder, wall_offset
from evenstep.telemetry import Role

_RECENT: Final = 50
"""The iterations of each worker that everything is worked out from: long enough to be calm, short enough to be new."""
_KEPT: Final = 500
"""Those that the gain is worked out from, since few iterations have equal sizes to compare with."""
_OVER: Final = ("finished", "failed", "gone")
_SILENT_SECONDS: Final = 5.0
_SILENT_ITERATIONS: Final = 5


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LiveWorker:
    """One worker over its latest iterations.

    `throughput` is in samples per second of all its time, `speed` of pure compute; shares are of its time, 0 to 1.
    `lead` and `staleness` are those of its latest push, None without servers. `state` is a few words: what it does, or
    how it is made slower on purpose.
    """

    worker: int
    state: str
    throughput: float
    speed: float
    batch_size: int
    waiting_share: float
    input_share: float
    communication_share: float
    iterations: int
    lead: int | None
    staleness: int | None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LiveView:
    """All workers; `samples` are those of the whole run, `epoch` counts from 0 and may be under way."""

    scheme: str
    simulated: bool
    emulated: bool
    iterations: int
    iterations_per_epoch: int
    samples: int
    throughput: float
    waiting_share: float
    workers: tuple[LiveWorker, ...]
    verdict: Verdict
    latest: tuple[str, ...]


@final
class LiveRun:
    """Takes events as they come, and says how the run is doing."""

    def __init__(self) -> None:
        self._builder = RunBuilder(keep=_KEPT)
        self._heard: dict[int, float] = {}
        # What each worker has said itself is over, and what the servers say; files are read one after the other, so
        # neither is told before or after the other.
        self._over: dict[int, str] = {}
        self._left: dict[int, str] = {}
        self._slowness: dict[int, str] = {}

    def take(self, role: Role, event: Mapping[str, Any], now: float) -> None:
        """Add an event that came `now`, in seconds of any clock; one that is damaged, which `read_run` names, is not.

        Damage is no reason not to watch the rest of a run.
        """
        with suppress(AttributeError, KeyError, TypeError, ValueError):
            self._take(role, event, now)

    def _take(self, role: Role, event: Mapping[str, Any], now: float) -> None:
        if role == "worker":
            self._builder.take(event)
            if "worker" in event:
                self._hear(event["worker"], event, now)
        elif role == "server":
            self._builder.take_server(event)
            if event["event"] == "leave":
                self._left[event["worker"]] = "finished" if event["why"] == Why.DONE else "gone"
            elif event["event"] == "join":
                self._left.pop(event["worker"], None)
        else:
            self._builder.take_launcher(event)

    def _hear(self, worker: int, event: Mapping[str, Any], now: float) -> None:
        self._heard[worker] = now
        if event["event"] == "error":
            self._over[worker] = "failed"
        elif event["event"] == "end":
            if self._over.get(worker) != "failed":
                self._over[worker] = "finished"
        else:
            self._over.pop(worker, None)
        if event["event"] == "run":
            self._slowness.pop(worker, None)
        elif event["event"] == "disturbance":
            self._slowness[worker] = _slowed(event["factor"], event["extra_seconds"])

    def view(self, now: float) -> LiveView | None:
        """How the run is doing; None as long as no worker has finished an iteration."""
        try:
            run = self._builder.finish()
        except ConfigError:
            return None
        recent = {worker: run.iterations[worker][-_RECENT:] for worker in run.workers}
        workers = tuple(self._worker(run, worker, each, now) for worker, each in recent.items())
        done = [self._builder.done[worker] for worker in run.workers]
        counts = [each.count for each in done]
        there = [each for each in workers if each.state not in _OVER] or workers
        return LiveView(
            scheme=run.scheme,
            simulated=run.simulated,
            emulated=run.emulated,
            iterations=sum(counts) // len(counts) if run.servers is not None else min(counts),
            iterations_per_epoch=run.iterations_per_epoch,
            samples=sum(each.samples for each in done),
            throughput=sum(each.throughput for each in there),
            waiting_share=float(np.mean([each.waiting_share for each in workers])),
            workers=workers,
            verdict=_verdict(run, recent),
            latest=_latest(run),
        )

    def _worker(self, run: RecordedRun, worker: int, done: Iterations, now: float) -> LiveWorker:
        seconds = float(done.iteration_seconds.sum()) or 1e-9
        compute = float(done.compute_seconds.sum())
        return LiveWorker(
            worker=worker,
            state=self._state(run, worker, seconds / len(done), now),
            throughput=float(done.samples.sum()) / seconds,
            speed=float(done.samples.sum()) / compute if compute else 0.0,
            # The median: the last slice of an epoch is shorter.
            batch_size=int(np.median(done.samples)),
            waiting_share=float(done.wait_seconds.sum()) / seconds,
            input_share=float(done.input_seconds.sum()) / seconds,
            communication_share=float(done.comm_seconds.sum()) / seconds,
            iterations=self._builder.done[worker].count,
            lead=None if run.servers is None else int(np.nan_to_num(done.lead)[-1]),
            staleness=None if run.servers is None else int(np.nan_to_num(done.staleness)[-1]),
        )

    def _state(self, run: RecordedRun, worker: int, iteration_seconds: float, now: float) -> str:
        silent = now - self._heard.get(worker, now)
        over = self._over.get(worker) or self._left.get(worker)
        if over is not None:
            return over
        if silent >= max(_SILENT_SECONDS, _SILENT_ITERATIONS * iteration_seconds) and not run.simulated:
            return f"silent {duration(round(silent))}"
        return self._slowness.get(worker) or ("simulated" if run.simulated else "training")


def _verdict(run: RecordedRun, recent: Mapping[int, Iterations]) -> Verdict:
    """On the latest iterations; few have equal sizes, so what was gained is measured on more of them."""
    if run.servers is not None:
        return served_verdict(served_workers(replace(run, iterations=recent)), longer=served_workers(run))
    together = {worker: done[: run.length][-_RECENT:] for worker, done in run.iterations.items()}
    latest = replace(run, iterations=together)
    return verdict_of(account_of(latest), run.workers, run.scheme, longer=account_of(run))


def _latest(run: RecordedRun) -> tuple[str, ...]:
    """The last few things that happened, in their order, whoever wrote them down."""
    first = min(run.about)

    def when(each: Happening) -> float:
        if each.at is None:
            return -math.inf
        return each.at + wall_offset(run.about.get(first if each.writer is None else each.writer, {}))

    return tuple(each.text for each in sorted(run.happenings, key=when) if not each.routine)[-3:]


def _slowed(factor: float, extra_seconds: float) -> str:
    """As short as a column of a table needs it; empty for what is not slowed."""
    by = [f"{factor:.3g}x"] if factor != 1 else []
    by += [f"{1000 * extra_seconds:.3g} ms"] if extra_seconds else []
    return f"slowed {', '.join(by)}" if by else ""
