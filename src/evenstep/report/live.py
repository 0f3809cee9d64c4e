"""How a run is doing right now, in a few numbers per worker: what `evenstep top` shows."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, final

import numpy as np
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from evenstep.core.errors import ConfigError
from evenstep.core.supervision import Why
from evenstep.report.account import Verdict, duration, served_verdict, verdict_of
from evenstep.report.accounts import account_of, served_workers
from evenstep.report.happened import Happening
from evenstep.report.iterations import Iterations
from evenstep.report.recorded import RecordedRun, RunBuilder
from evenstep.telemetry.events import Disturbed, Ended, Event, Failed, Joined, Left, Run, WorkerEvent

_RECENT: Final = 50
"""The latest iterations of each worker that all numbers are of: enough to be stable, few enough to be current."""
_KEPT: Final = 1000
"""Those that the gain is of: it is known from changes of sizes, which may be rare."""
_OVER: Final = ("finished", "failed", "gone")
_SILENT_SECONDS: Final = 5.0
_SILENT_ITERATIONS: Final = 5
_OTHER_LINES: Final = 9
"""Lines of the table that are not workers."""
_BAR, _WIDE = 10, 96
_STYLES: Final = {"training": "green", "simulated": "dim", "finished": "dim", "failed": "red"}
"""By a worker's state; any other is yellow."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LiveWorker:
    """One worker over its latest iterations.

    `throughput` is in samples per second of all its time, `speed` of pure compute; shares are of its time, 0 to 1.
    `lead` and `staleness` are those of its latest push, None without servers. `state` is a few words: what it does, or
    how it is slowed on purpose.
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
    """All workers; `samples` are those of the whole run."""

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
    """Takes events as they come, and summarises the run so far."""

    def __init__(self) -> None:
        self._builder = RunBuilder(keep=_KEPT)
        self._heard: dict[int, float] = {}
        # What each worker has recorded of its end, and what the servers have: files are read one after the other, so
        # the order of the two is unknown.
        self._over: dict[int, str] = {}
        self._left: dict[int, str] = {}
        self._slowness: dict[int, str] = {}

    def take(self, event: Event, now: float) -> None:
        """Add an event that came `now`, in seconds of any clock."""
        self._builder.take(event)
        if isinstance(event, WorkerEvent):
            self._hear(event, now)
        elif isinstance(event, Left):
            self._left[event.worker] = "finished" if event.why == Why.DONE else "gone"
        elif isinstance(event, Joined):
            self._left.pop(event.worker, None)

    def _hear(self, event: WorkerEvent, now: float) -> None:
        worker = event.worker
        self._heard[worker] = now
        if isinstance(event, Failed):
            self._over[worker] = "failed"
        elif isinstance(event, Ended):
            self._over.setdefault(worker, "finished")
        else:
            self._over.pop(worker, None)
        if isinstance(event, Run):
            self._slowness.pop(worker, None)
        elif isinstance(event, Disturbed):
            self._slowness[worker] = _slowed(event.factor, event.extra_seconds)

    def view(self, now: float) -> LiveView | None:
        """How the run is doing; None until a worker has finished an iteration."""
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
    """On the latest iterations; the gain is of more, since sizes may change rarely."""
    if run.servers is not None:
        return served_verdict(served_workers(replace(run, iterations=recent)), longer=served_workers(run))
    latest = replace(run, iterations={worker: done[-_RECENT:] for worker, done in run.counted.items()})
    return verdict_of(account_of(latest), run.workers, run.scheme, longer=account_of(run))


def _latest(run: RecordedRun) -> tuple[str, ...]:
    """The last few happenings in their order, by any writer."""

    def when(each: Happening) -> float:
        return -math.inf if each.event.at is None else each.event.at + run.wall_offset(each.writer)

    return tuple(each.text for each in sorted(run.happenings, key=when) if not each.routine)[-3:]


def _slowed(factor: float, extra_seconds: float) -> str:
    """Short enough for a column of a table; empty for a worker that is not slowed."""
    by = [f"{factor:.3g}x"] if factor != 1 else []
    by += [f"{1000 * extra_seconds:.3g} ms"] if extra_seconds else []
    return f"slowed {', '.join(by)}" if by else ""


# For a terminal of any size.


def live_table(view: LiveView, *, title: str, width: int, height: int) -> RenderableType:
    """The view in about that many lines.

    Of more workers than fit it has those that wait least, since the others wait for them.
    """
    served = any(each.lead is not None for each in view.workers)
    room = max(3, height - _OTHER_LINES - len(view.latest))
    shown = list(view.workers)
    if len(shown) > room:
        shown = sorted(sorted(shown, key=lambda each: each.waiting_share)[:room], key=lambda each: each.worker)
    bars = width >= _WIDE
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for heading in ("worker", "state"):
        table.add_column(heading, no_wrap=True)
    numbers = ["samples/s", "speed", "batch", "waiting", *([""] * bars), "input", "communication"]
    for heading in [*numbers, "lead", "staleness"] if served else numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    for worker in shown:
        table.add_row(*_cells(worker, bars=bars))
    parts: list[RenderableType] = [_heading(view, title), table]
    if len(shown) < len(view.workers):
        parts.append(Text(f"and {len(view.workers) - len(shown)} more, who wait longer", style="dim"))
    parts.append(Text(view.verdict.text, style="bold"))
    parts += [Text(text, style="dim", overflow="ellipsis", no_wrap=True) for text in view.latest]
    return Group(*parts)


def _heading(view: LiveView, title: str) -> Text:
    epoch = f"   epoch {view.iterations / view.iterations_per_epoch:.1f}" if view.iterations_per_epoch else ""
    kind = " (simulated)" if view.simulated else " (emulated devices)" if view.emulated else ""
    heading = Text(f"{title}  ", style="bold", overflow="ellipsis", no_wrap=True)
    heading.append(f"{view.scheme}{kind}\n", style="cyan")
    heading.append(
        f"{view.throughput:,.0f} samples/s   waiting {view.waiting_share:.0%}   iteration {view.iterations:,}"
        f"{epoch}   {view.samples:,} samples",
        style="not bold",
    )
    return heading


def _cells(worker: LiveWorker, *, bars: bool) -> list[Text]:
    filled = round(_BAR * min(1.0, worker.waiting_share))
    cells = [
        Text(str(worker.worker)),
        Text(worker.state, style=_STYLES.get(worker.state, "yellow")),
        Text(f"{worker.throughput:,.1f}"),
        Text(f"{worker.speed:,.1f}"),
        Text(str(worker.batch_size)),
        Text(f"{worker.waiting_share:.0%}"),
        *([Text("#" * filled, style="yellow").append("." * (_BAR - filled), style="dim")] if bars else []),
        Text(f"{worker.input_share:.0%}"),
        Text(f"{worker.communication_share:.0%}"),
    ]
    if worker.lead is not None:
        cells += [Text(str(worker.lead)), Text(str(worker.staleness))]
    return cells
