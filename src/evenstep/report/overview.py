"""All contents of a report on a run, for its page and for `evenstep report --json`."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, final

import numpy as np

from evenstep.report.conclusions import conclusions_of
from evenstep.report.recorded import RecordedRun
from evenstep.report.summary import RunSummary, speed_ups, summary_of
from evenstep.report.timeline import Curve, Move, curves_of, moves_of


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunOverview:
    """A run, its numbers and its changes over time; `name` is unique among the runs of a report.

    `next` is what to do about the verdict: the gain of other sizes, and a command; empty if there is nothing to add.
    """

    name: str
    next: str = ""
    run: RecordedRun
    summary: RunSummary
    moves: tuple[Move, ...]
    curves: tuple[Curve, ...]

    def marked(self, worker: int) -> str:
        """The number of a worker, and whether the verdict calls it slow."""
        return f"{worker} (slow)" if worker == self.summary.verdict.worker else f"{worker}"


def overview_of(name: str, run: RecordedRun) -> RunOverview:
    """The overview of a run."""
    concluded = conclusions_of(run)
    return RunOverview(
        name=name,
        run=run,
        summary=summary_of(run, concluded),
        moves=tuple(moves_of(run, concluded.elasticities)),
        curves=tuple(curves_of(run)),
    )


def about(run: RecordedRun) -> str:
    """The time and the place of a run, and what ran: date, command, commit, devices and versions, as far as known."""
    first = run.about[min(run.about)]
    devices = Counter(f"{each.gpu or 'CPU'} on {each.host}" for each in run.about.values() if each.host)
    versions = (("evenstep", first.version), ("PyTorch", first.torch), ("Python", first.python))
    parts = (
        "" if first.unix_seconds is None else f"{datetime.fromtimestamp(first.unix_seconds, UTC):%Y-%m-%d %H:%M} UTC",
        first.command,
        f"commit {first.commit}" if first.commit else "",
        ", ".join(f"{count} x {device}" for device, count in devices.items()),
        ", ".join(f"{name} {version}" for name, version in versions if version),
    )
    return " \N{MIDDLE DOT} ".join(part for part in parts if part)


def compared(overviews: Sequence[RunOverview]) -> str:
    """Compare the speeds of several runs with the first, in one sentence."""
    ratios = zip(overviews, speed_ups([each.summary for each in overviews]), strict=True)
    (first, _), (second, ratio), *others = ((each.name, ratio) for each, ratio in ratios)
    more = (f", {name} {other:.2f} times" for name, other in others)
    return f"{second} trained {ratio:.2f} times as fast as {first}{''.join(more)}."


def values_of(overview: RunOverview) -> dict[str, Any]:
    """The numbers as plain values that JSON can hold."""
    noted = {each.name: (each.values[-1], len(each.values)) for each in overview.curves}
    return {
        "name": overview.name,
        "about": about(overview.run),
        "next": overview.next,
        **asdict(overview.summary),
        "size_changes": [asdict(each) for each in overview.moves],
        "events": [
            {
                "seconds": None if each.event.at is None else overview.run.since_begin(each.event.at, each.writer),
                "event": each.event.kind,
                "worker": each.worker,
                "text": each.text,
            }
            for each in overview.run.happenings
        ],
        "noted": {  # JSON has no NaN.
            name: {"last": float(last) if np.isfinite(last) else None, "count": count}
            for name, (last, count) in noted.items()
        },
    }
