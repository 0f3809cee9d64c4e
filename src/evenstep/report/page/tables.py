"""The tables of a page: runs side by side, the workers of a run, and what happened."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

from evenstep.report.account.account import Part
from evenstep.report.overview import RunOverview
from evenstep.report.recorded import ElasticRecord, ServerRecord
from evenstep.report.summary import WorkerSummary, speed_ups
from evenstep.telemetry.events import DeviceSampled

_MAX_EVENTS: Final = 200  # Rows; --json has all.
_MAX_SIZES: Final = 16  # In a cell.


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of texts by column heading; the first column has the headings of the rows."""

    caption: str
    rows: Sequence[Mapping[str, str]]

    @property
    def headings(self) -> list[str]:
        """The columns with an entry in any row."""
        return list(dict.fromkeys(heading for row in self.rows for heading, text in row.items() if text))


def runs_table(overviews: Sequence[RunOverview]) -> Table:
    """A row per run; the others are compared with the first."""
    first, rows = overviews[0].name, []
    for each, speed_up in zip(overviews, speed_ups([each.summary for each in overviews]), strict=True):
        run, summary = each.run, each.summary
        row = {
            "run": each.name,
            "samples/s": f"{summary.samples_per_second:,.0f}",
            f"speed-up over run {first}": f"{speed_up:.2f}x" if len(overviews) > 1 else "",
            "gain from its batch sizes": f"{summary.over_equal_sizes or ''}",
            "of the ideal": f"{summary.of_ideal:.0%}",
            "waiting": f"{summary.waiting_share:.0%}",
            "average iteration": _seconds(summary.iteration_seconds),
            "iterations": f"{summary.iterations:,}",
            "training time": _seconds(summary.training_seconds),
            **{f"last {curve.name}": f"{curve.values[-1]:.4g}" for curve in each.curves},
            "workers": f"{len(summary.workers):,}",
            "global batch": f"{summary.global_batch_size:,}",
            **_served(summary.served),
            **_elastic(summary.elastic),
            "scheme": "" if each.name == run.scheme else f"{run.scheme}{run.kind}",
        }
        rows.append(row)
    return Table(caption="All runs", rows=rows)


def _served(served: ServerRecord | None) -> dict[str, str]:
    if served is None:
        return {}
    return {
        "commits/s": f"{served.commits_per_second:,.0f}",
        "gradients pushed": f"{served.bytes_per_second / 1e6:,.1f} MB/s",
        "workers came / went": f"{served.joins} / {len(served.leaves)}",
    }


def _elastic(elastic: ElasticRecord | None) -> dict[str, str]:
    if elastic is None:
        return {}
    return {
        "members": " ".join(map(str, elastic.members)),
        "joined / died": f"{elastic.joins} / {elastic.deaths}",
        "steps not counted": f"{elastic.not_counted}",
    }


def _seconds(seconds: float) -> str:
    text = f"{seconds:,.1f} s" if seconds >= 1 else f"{1000 * seconds:,.3g} ms"
    return text.replace(" ", "\N{NO-BREAK SPACE}")


def workers_table(overview: RunOverview) -> Table:
    """A row per worker."""
    all_costs = sum(each.cost or 0.0 for each in overview.summary.workers)
    return Table(
        caption="Workers. Time per sample: over the others' median, at equal sizes",
        rows=[
            {"worker": overview.marked(each.worker)}
            | _worker(each, all_costs)
            | _device(overview.run.devices.get(each.worker, ()))
            | {"where": each.place}
            for each in overview.summary.workers
        ],
    )


def _worker(worker: WorkerSummary, all_costs: float) -> dict[str, str]:
    row = {
        "samples/s of compute": f"{worker.speed:,.1f}",
        "time per sample": "" if worker.slowdown is None else f"{worker.slowdown:.2f}x",
        "batch size": ", then ".join(map(str, dict.fromkeys((worker.first_batch_size, worker.last_batch_size)))),
        "samples": f"{worker.samples:,}",
        "iterations": f"{worker.iterations:,}",
        "waiting": f"{worker.waiting_share:.0%}",
        "part of the cost": f"{(worker.cost or 0.0) / all_costs:.1%}" if all_costs else "",
        "padding": "" if worker.padding is None else f"{worker.padding:.1%}",
    }
    if worker.pushes is not None:
        row |= {
            "largest lead": f"{worker.pushes.largest_lead}",
            "average staleness": f"{worker.pushes.mean_staleness:.1f}",
            "largest staleness": f"{worker.pushes.largest_staleness}",
            "largest behind, batches": f"{worker.pushes.largest_behind:.1f}",
        }
    return row


def _device(states: Sequence[DeviceSampled]) -> dict[str, str]:
    """The state of a GPU over the run."""
    if not states:
        return {}
    return {
        "GPU busy": f"{sum(each.utilisation for each in states) / len(states):.0%}",
        "most GPU memory": f"{max(each.memory_bytes for each in states) / 1e9:.1f} GB",
        "hottest": f"{max(each.celsius for each in states):.0f} \N{DEGREE SIGN}C",
    }


def parts_table(overview: RunOverview, order: Iterable[Part]) -> Table:
    """The use of each worker's time."""
    parts = [part.value for part in order]
    rows = [
        {"worker": f"{each.worker}"} | {part: f"{each.parts[part]:.1%}" for part in parts}
        for each in overview.summary.workers
    ]
    return Table(caption="The parts of each worker's time", rows=rows)


def events_table(overview: RunOverview) -> Table:
    """Events by time: size changes and their reasons, workers that joined and left, failures."""
    found = [
        (
            move.seconds,
            f"sizes, from iteration {move.iteration}",
            f"{_sizes(move.before)} became {_sizes(move.after)}: {move.reason}",
        )
        for move in overview.moves
    ]
    for each in overview.run.happenings:
        at = each.event.at
        seconds = float("inf") if at is None else overview.run.since_begin(at, each.writer)
        found.append((seconds, each.event.kind.replace("_", " "), each.text))
    found.sort(key=lambda row: row[0])
    shown = found if len(found) <= _MAX_EVENTS else [*found[: _MAX_EVENTS // 2], *found[-_MAX_EVENTS // 2 :]]
    left = len(found) - len(shown)
    return Table(
        caption="In the order of time" + (f" ({left} in the middle are left out; --json has them all)" if left else ""),
        rows=[
            {"second": "" if at == float("inf") else f"{at:.2f}", "what": what, "about it": text}
            for at, what, text in shown
        ],
    )


def _sizes(sizes: Sequence[int]) -> str:
    return " ".join(map(str, sizes[:_MAX_SIZES])) + (" ..." if len(sizes) > _MAX_SIZES else "")
