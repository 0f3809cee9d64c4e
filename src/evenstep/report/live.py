"""The current state of a run in a few numbers per worker, as `evenstep top` shows it."""

import math
from dataclasses import dataclass, replace
from typing import Final, final

import numpy as np
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from evenstep.core.errors import ConfigError
from evenstep.report.account.account import Part
from evenstep.report.account.served import served_verdict
from evenstep.report.account.verdict import Verdict, duration, verdict_of
from evenstep.report.conclusions import account_of, served_workers
from evenstep.report.happened import Happening
from evenstep.report.recorded import ElasticRecord, RecordedRun, RunBuilder
from evenstep.report.summary import WorkerSummary, worker_summary
from evenstep.telemetry.events import Disturbed, Ended, Event, Failed, Run, WorkerEvent

_RECENT: Final = 50
"""The number of each worker's latest iterations behind all numbers: enough to be stable, few enough to be current."""
_KEPT: Final = 1000
"""The number of iterations behind the gain: it is known from size changes, which may be rare."""
_OVER: Final = ("finished", "failed", "gone")
_BAR, _WIDE = 10, 96  # Columns of a bar, and of a terminal that has room for bars.
_STYLES: Final = {"training": "green", "simulated": "dim", "finished": "dim", "failed": "red"}
"""Colours by a worker's state; other states are yellow."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LiveWorker:
    """One worker: `iterations` of the whole run, and `recent`, its latest ones.

    `state` says in a few words what it does, or how it is slowed on purpose.
    """

    state: str
    iterations: int
    recent: WorkerSummary


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LiveView:
    """All workers; `kind` says what is not real about the run, and `samples` counts those of the whole run."""

    scheme: str
    kind: str
    iterations: int
    iterations_per_epoch: int
    samples: int
    samples_per_second: float
    waiting_share: float
    workers: tuple[LiveWorker, ...]
    verdict: Verdict
    elastic: ElasticRecord | None
    latest: tuple[str, ...]


@final
class LiveRun:
    """Summarises a run so far, from events as they come."""

    def __init__(self) -> None:
        self._builder = RunBuilder(keep=_KEPT)
        self._heard: dict[int, float] = {}
        self._over: dict[int, str] = {}
        self._slowness: dict[int, str] = {}

    def take(self, event: Event, now: float) -> None:
        """Add an event that came at `now`, in seconds of any clock."""
        self._builder.take(event)
        if not isinstance(event, WorkerEvent):
            return
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
            self._slowness[worker] = f"slowed {event.by}" if event.by else ""

    def view(self, now: float) -> LiveView | None:
        """The current view of the run; None until a worker has finished an iteration."""
        try:
            run = self._builder.finish()
        except ConfigError:
            return None
        recent = replace(run, iterations={worker: done[-_RECENT:] for worker, done in run.iterations.items()})
        workers = tuple(self._worker(recent, worker, now) for worker in run.workers)
        done = [self._builder.done[worker] for worker in run.workers]
        counts = [each.count for each in done]
        iterations = sum(counts) // len(counts) if run.servers is not None else min(counts)
        if run.elastic is not None:  # They are numbered through, whoever is there.
            iterations = 1 + int(max(run.iterations[worker].numbers[-1] for worker in run.workers))
        there = [each for each in workers if each.state not in _OVER] or workers
        return LiveView(
            scheme=run.scheme,
            kind=run.kind,
            iterations=iterations,
            iterations_per_epoch=run.iterations_per_epoch,
            samples=sum(each.samples for each in done),
            samples_per_second=sum(each.recent.samples_per_second for each in there),
            waiting_share=float(np.mean([each.recent.waiting_share for each in workers])),
            workers=workers,
            verdict=_verdict(run, recent),
            elastic=run.elastic,
            latest=_latest(run),
        )

    def _worker(self, run: RecordedRun, worker: int, now: float) -> LiveWorker:
        """A worker of a run that contains only the latest iterations."""
        recent = worker_summary(run, worker)
        state = self._state(run, worker, recent.iteration_seconds, now)
        return LiveWorker(state=state, iterations=self._builder.done[worker].count, recent=recent)

    def _state(self, run: RecordedRun, worker: int, iteration_seconds: float, now: float) -> str:
        silent = now - self._heard.get(worker, now)
        members = () if run.elastic is None else run.elastic.members
        if worker in self._over:
            return self._over[worker]
        if worker in run.absent or (members and worker not in members):
            return "gone"
        if silent >= 5 * max(1.0, iteration_seconds) and not run.simulated:
            return f"silent {duration(round(silent))}"
        return self._slowness.get(worker) or ("simulated" if run.simulated else "training")


def _verdict(run: RecordedRun, recent: RecordedRun) -> Verdict:
    """The verdict on the latest iterations; its gain is from more iterations, since sizes may change rarely."""
    if run.servers is not None:
        return served_verdict(served_workers(recent), longer=served_workers(run))
    latest = replace(run, iterations={worker: done[-_RECENT:] for worker, done in run.counted.items()})
    return verdict_of(account_of(latest), list(latest.counted), run.scheme, longer=account_of(run))


def _latest(run: RecordedRun) -> tuple[str, ...]:
    """The last few happenings in order, by any writer."""

    def when(each: Happening) -> float:
        return -math.inf if each.event.at is None else each.event.at + run.wall_offset(each.writer)

    return tuple(each.text for each in sorted(run.happenings, key=when) if not each.routine)[-3:]


# For a terminal of any size.


def live_table(view: LiveView, *, title: str, width: int, height: int) -> RenderableType:
    """Show the view in about that many lines, with the columns for which there is room.

    If not all workers fit, it shows those that wait least, since the others wait for them.
    """
    room = max(3, height - 9 - len(view.latest))  # Nine lines are not of workers.
    shown = list(view.workers)
    if len(shown) > room:
        shown = sorted(shown, key=lambda each: each.recent.waiting_share)[:room]
        shown.sort(key=lambda each: each.recent.worker)
    rows = [_row(worker, bars=width >= _WIDE) for worker in shown]
    for least_needed in ("communication", "input", "speed", "staleness"):
        if sum(2 + max(len(name), *(row[name].cell_len for row in rows)) for name in rows[0]) > width:
            for row in rows:
                row.pop(least_needed, None)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for number, heading in enumerate(rows[0]):
        table.add_column(heading, justify="left" if number < 2 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row.values())
    parts: list[RenderableType] = [_heading(view, title), table]
    if len(shown) < len(view.workers):
        parts.append(Text(f"and {len(view.workers) - len(shown)} more, who wait longer", style="dim"))
    parts.append(Text(view.verdict.text, style="bold"))
    parts += [Text(text, style="dim", overflow="ellipsis", no_wrap=True) for text in view.latest]
    return Group(*parts)


def _heading(view: LiveView, title: str) -> Text:
    epoch = f"   epoch {view.iterations / view.iterations_per_epoch:.1f}" if view.iterations_per_epoch else ""
    heading = Text(f"{title}  ", style="bold", overflow="ellipsis", no_wrap=True)
    heading.append(f"{view.scheme}{view.kind}\n", style="cyan")
    heading.append(
        f"{view.samples_per_second:,.0f} samples/s   waiting {view.waiting_share:.0%}   iteration {view.iterations:,}"
        f"{epoch}   {view.samples:,} samples",
        style="not bold",
    )
    if view.elastic is not None:
        heading.append(f"\n{view.elastic.text}", style="not bold")
    return heading


def _row(worker: LiveWorker, *, bars: bool) -> dict[str, Text]:
    """A worker's cells, by their headings."""
    recent, parts = worker.recent, worker.recent.parts
    filled = round(_BAR * min(1.0, recent.waiting_share))
    row = {
        "worker": Text(str(recent.worker)),
        "state": Text(worker.state, style=_STYLES.get(worker.state, "yellow")),
        "samples/s": Text(f"{recent.samples_per_second:,.1f}"),
        "speed": Text(f"{recent.speed:,.1f}"),
        "batch": Text(str(recent.last_batch_size)),
        "waiting": Text(f"{recent.waiting_share:.0%}"),
    }
    if bars:
        row[""] = Text("#" * filled, style="yellow").append("." * (_BAR - filled), style="dim")
    row |= {part: Text(f"{parts[part]:.0%}") for part in (Part.INPUT.value, Part.COMMUNICATION.value)}
    if (pushes := recent.pushes) is not None:
        row |= {"lead": Text(str(pushes.largest_lead)), "staleness": Text(f"{pushes.mean_staleness:.1f}")}
    return row
