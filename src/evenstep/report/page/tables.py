"""The tables of a page that belong to no plot: runs side by side, workers, and what happened."""

from collections.abc import Sequence
from typing import Final

from evenstep.report.overview import RunOverview
from evenstep.report.page.blocks import Table

_MAX_EVENTS: Final = 200


def runs_table(overviews: Sequence[RunOverview]) -> Table:
    """A row per run; the others are compared with the first."""
    first = overviews[0].summary.samples_per_second
    named = any(each.name != each.run.scheme for each in overviews)
    rows = [
        (
            each.name,
            f"{each.summary.samples_per_second:,.0f}",
            f"{each.summary.samples_per_second / first:.2f}x",
            "" if each.gain.speed_up is None else f"{each.gain.speed_up}",
            f"{each.gain.of_ideal:.0%}",
            f"{each.waiting_share:.0%}",
            f"{1000 * each.summary.iteration_seconds:,.1f} ms",
            f"{each.summary.training_seconds:,.1f} s",
            *([f"{each.run.scheme}{each.run.kind}"] if named else []),
        )
        for each in overviews
    ]
    return Table(
        caption=f"All runs; times as fast as {overviews[0].name}, and as the same run with equal sizes, with the 95 %"
        " interval",
        headings=(
            "run",
            "samples/s",
            f"over {overviews[0].name}",
            "over equal sizes",
            "of the ideal",
            "waiting",
            "average iteration",
            "training time",
            *(["scheme"] if named else []),
        ),
        rows=rows,
        words=int(named),
    )


def workers_table(overview: RunOverview) -> Table:
    """A row per worker."""
    served = overview.run.servers is not None
    all_costs = sum(each.cost or 0.0 for each in overview.workers)
    padded = any(each.padding is not None for each in overview.workers)
    placed = any(each.place for each in overview.workers)
    rows = []
    for each in overview.workers:
        row = [
            str(each.worker),
            f"{each.speed:,.1f}",
            "" if each.slowdown is None else f"{each.slowdown:.2f}x",
            ", then ".join(map(str, dict.fromkeys((each.first_batch_size, each.last_batch_size)))),
            f"{each.samples:,}",
            f"{each.iterations:,}",
            f"{each.parts['waiting']:.0%}",
        ]
        if all_costs:
            row.append(f"{(each.cost or 0.0) / all_costs:.1%}")
        if padded:
            row.append(f"{each.padding or 0.0:.1%}")
        if served:
            row += [str(each.largest_lead), f"{each.mean_staleness or 0.0:.1f}"]
        rows.append((*row, *([each.place] if placed else [])))
    headings = ["worker", "samples/s of compute", "time per sample", "batch size", "samples", "iterations", "waiting"]
    headings += [*(["part of the cost"] if all_costs else []), *(["padding"] if padded else [])]
    if served:
        headings += ["largest lead", "average staleness"]
    if placed:
        headings.append("where")
    return Table(
        caption="Workers; time per sample is that over the median of the others', at equal sizes",
        headings=headings,
        rows=rows,
        words=int(placed),
    )


def events_table(overview: RunOverview) -> Table:
    """What happened, by time: changes of sizes and their reasons, workers that joined and left, failures."""
    times = overview.times
    found: list[tuple[float, str, str]] = [
        (
            move.seconds,
            f"sizes, from iteration {move.iteration}",
            f"{_sizes(move.before)} became {_sizes(move.after)}: {move.reason}",
        )
        for move in overview.moves
    ]
    for each in overview.run.happenings:
        at = times.since_begin(each.event.at, each.writer)
        found.append((float("inf") if at is None else at, each.event.kind.replace("_", " "), each.text))
    found.sort(key=lambda row: row[0])
    shown = found if len(found) <= _MAX_EVENTS else [*found[: _MAX_EVENTS // 2], *found[-_MAX_EVENTS // 2 :]]
    left = len(found) - len(shown)
    return Table(
        caption="In the order of time" + (f" ({left} in the middle are left out; --json has them all)" if left else ""),
        headings=("second", "what", "about it"),
        rows=[("" if at == float("inf") else f"{at:.2f}", what, text) for at, what, text in shown],
        words=2,
    )


def _sizes(sizes: Sequence[int]) -> str:
    shown = " ".join(map(str, sizes[:16]))
    return shown if len(sizes) <= 16 else f"{shown} ..."
