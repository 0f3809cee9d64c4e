"""How a run is doing right now, in a few numbers per worker: what `evenstep top` shows."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np

from evenstep.core.errors import ConfigError
from evenstep.report.iterations import Iterations
from evenstep.report.recorded import RecordedRun, RunBuilder
from evenstep.report.verdict import Verdict, verdict_of
from evenstep.telemetry import Role

_RECENT: Final = 50
"""The iterations of each worker that everything is worked out from: long enough to be calm, short enough to be new."""
_QUIET: Final = ("join", "snapshot")
_SILENT_SECONDS: Final = 5.0
_SILENT_ITERATIONS: Final = 5


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LiveWorker:
    """One worker over its latest iterations.

    `throughput` is in samples per second of all its time, `speed` of pure compute; shares are of its time, 0 to 1.
    `lead` and `staleness` are those of its latest push, None without servers. `state` is a word or two.
    """

    worker: int
    state: str
    throughput: float
    speed: float
    batch_size: int
    waiting_share: float
    input_share: float
    transfer_share: float
    iterations: int
    lead: int | None
    staleness: int | None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LiveView:
    """All workers; `samples` are those of the whole run, `epoch` counts from 0 and may be under way."""

    scheme: str
    simulated: bool
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
        self._builder = RunBuilder(keep=_RECENT)
        self._heard: dict[int, float] = {}
        self._gone: dict[int, str] = {}

    def take(self, role: Role, event: Mapping[str, Any], now: float) -> None:
        """Add an event that came `now`, in seconds of any clock.

        Raises:
            KeyError: It lacks what every version has written.
        """
        if role == "worker":
            self._builder.take(event)
            if "worker" in event:
                self._heard[event["worker"]] = now
                self._gone.pop(event["worker"], None)
        elif role == "server":
            self._builder.take_server(event)
            if event["event"] == "leave":
                self._gone[event["worker"]] = event["why"]
            elif event["event"] == "join":
                self._gone.pop(event["worker"], None)
        else:
            self._builder.take_launcher(event)

    def view(self, now: float) -> LiveView | None:
        """How the run is doing; None as long as no worker has finished an iteration."""
        try:
            run = self._builder.finish()
        except ConfigError:
            return None
        recent = {worker: done[-_RECENT:] for worker, done in run.iterations.items()}
        workers = tuple(self._worker(run, worker, done, now) for worker, done in recent.items())
        counts = [self._builder.done[worker].count for worker in run.workers]
        return LiveView(
            scheme=run.scheme,
            simulated=run.simulated,
            iterations=sum(counts) // len(counts) if run.servers is not None else min(counts),
            iterations_per_epoch=run.iterations_per_epoch,
            samples=sum(each.samples for each in self._builder.done.values()),
            throughput=sum(each.throughput for each in workers if each.state != "gone"),
            waiting_share=float(np.mean([each.waiting_share for each in workers])),
            workers=workers,
            verdict=verdict_of(run),
            latest=tuple(each.text for each in run.happenings if each.kind not in _QUIET)[-3:],
        )

    def _worker(self, run: RecordedRun, worker: int, done: Iterations, now: float) -> LiveWorker:
        seconds = float(done.iteration_seconds.sum()) or 1e-9
        compute = float(done.compute_seconds.sum())
        silent = now - self._heard.get(worker, now)
        patience = max(_SILENT_SECONDS, _SILENT_ITERATIONS * seconds / len(done))
        state = "training" if silent < patience else f"silent {_duration(silent)}"
        if run.simulated:
            state = "simulated"
        if worker in self._gone:
            state = "done" if self._gone[worker] == "is done" else "gone"
        return LiveWorker(
            worker=worker,
            state=state,
            throughput=float(done.samples.sum()) / seconds,
            speed=float(done.samples.sum()) / compute if compute else 0.0,
            # The median: the last slice of an epoch is shorter.
            batch_size=int(np.median(done.samples)),
            waiting_share=float(done.wait_seconds.sum()) / seconds,
            input_share=float(done.input_seconds.sum()) / seconds,
            transfer_share=float(done.comm_seconds.sum()) / seconds,
            iterations=self._builder.done[worker].count,
            lead=None if run.servers is None else int(np.nan_to_num(done.lead)[-1]),
            staleness=None if run.servers is None else int(np.nan_to_num(done.staleness)[-1]),
        )


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
