"""Values over time (batch sizes, speeds, notes), and histograms of how pushes went."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from evenstep.report.iterations import FloatArray
from evenstep.report.overview import RunOverview
from evenstep.report.page.blocks import (
    MAX_WORKERS,
    Plot,
    Table,
    Trace,
    layout,
    line,
    packed,
    shown_workers,
    worker_colour,
    worker_line,
)
from evenstep.report.recorded import RecordedRun
from evenstep.report.stretches import Bins, binned

_POINTS: Final = 2000
"""Of a line: a few for each pixel of a wide screen, so that zooming in shows more."""
_ROWS: Final = 24
_MAX_BANDS: Final = 8
_MAX_BARS: Final = 60
_TIME: Final = "seconds since the run began"


def sizes_plot(overview: RunOverview) -> Plot:
    """The samples of each worker's iterations over time, without the last, shorter slice of each epoch."""
    whole, series = _whole_slices(overview.run), []
    for worker in shown_workers(overview):
        kept = whole[worker]
        series.append(
            binned(overview.times.began[worker][kept], overview.run.iterations[worker].samples[kept], _POINTS)
        )
    sizes = ", ".join(f"worker {each.worker} {each.last_batch_size}" for each in overview.workers[:16])
    return Plot(
        key=f"sizes-{overview.name}",
        title="Batch sizes",
        summary=f"The samples of each worker's iterations over time. At the end: {sizes}.",
        traces=_worker_lines(overview, series, shape="hv"),
        layout=layout(_TIME, "samples per iteration"),
        table=_table(overview, series, "The mean samples per iteration over time"),
    )


def _whole_slices(run: RecordedRun) -> dict[int, npt.NDArray[np.bool_]]:
    """Which iterations of each worker have a whole global batch; all of them where that cannot be seen."""
    every = {worker: np.ones(len(done), dtype=np.bool_) for worker, done in run.iterations.items()}
    if run.servers is not None or run.unrecorded:
        return every
    together = list(run.iterations.values())
    numbers, at = np.unique(np.concatenate([each.numbers for each in together]), return_inverse=True)
    totals = np.bincount(at, weights=np.concatenate([each.samples for each in together]), minlength=len(numbers))
    whole = numbers[totals >= run.global_batch_size]
    return {worker: np.isin(each.numbers, whole) for worker, each in run.iterations.items()} if len(whole) else every


def speeds_plot(overview: RunOverview) -> Plot:
    """The speed of each worker over time."""
    measured = []
    for worker in shown_workers(overview):
        done, began = overview.run.iterations[worker], overview.times.began[worker]
        computed = (done.samples > 0) & (done.compute_seconds > 0)
        speed = np.where(computed, done.samples / np.where(computed, done.compute_seconds, 1.0), np.nan)
        measured.append(binned(began, speed, _POINTS))
    speed_title = "samples/s of compute"
    return Plot(
        key=f"speeds-{overview.name}",
        title="Speeds",
        summary="Samples per second of pure compute of each worker over time.",
        traces=_worker_lines(overview, measured, shape="linear"),
        layout=layout(
            _TIME, speed_title, yaxis={"rangemode": "tozero", "title": {"text": speed_title}, "automargin": True}
        ),
        table=_table(overview, measured, "The mean speed over time, in samples per second of compute"),
    )


def _worker_lines(overview: RunOverview, series: Sequence[Bins], *, shape: str) -> list[Trace]:
    """Each worker's line, within the band of its least and largest values if points stand for several values."""
    workers, traces = shown_workers(overview), []
    for index, bins in enumerate(series):
        x, group = packed(bins.x), {"legendgroup": str(index)}
        if not np.array_equal(bins.least, bins.largest) and len(workers) <= _MAX_BANDS:
            edge = {**group, "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False}
            fill = {"fill": "tonexty", "fillcolor": f"{worker_colour(index)}33"}
            traces += [line(x, packed(bins.least), **edge), line(x, packed(bins.largest), **edge, **fill)]
        style = {**worker_line(index), "shape": shape}
        traces.append(line(x, packed(bins.mean), name=f"worker {workers[index]}", line=style, **group))
    return traces


def _table(overview: RunOverview, series: Sequence[Bins], caption: str) -> Table:
    """The mean of every worker in a few stretches of the run."""
    edges = np.linspace(0.0, overview.times.seconds, _ROWS + 1)
    columns = []
    for bins in series:
        index = np.searchsorted(edges, bins.x, side="right") - 1
        columns.append(
            [_number(bins.mean[index == row].mean()) if (index == row).any() else "" for row in range(_ROWS)]
        )
    return Table(
        caption=caption,
        headings=("from second", *(f"worker {worker}" for worker in shown_workers(overview))),
        rows=[(_number(edges[row]), *(column[row] for column in columns)) for row in range(_ROWS)],
    )


def _number(value: float) -> str:
    """Four digits, or all of those before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def curve_plots(overviews: Sequence[RunOverview]) -> list[Plot]:
    """Everything that the scripts noted, of all runs, against time and against samples."""
    names = list(dict.fromkeys(curve.name for each in overviews for curve in each.curves))
    axes = (("seconds", _TIME), ("samples", "samples trained on"))
    return [_curve_plot(overviews, name, place, axis) for name in names for place, axis in axes]


def _curve_plot(overviews: Sequence[RunOverview], name: str, place: str, axis: str) -> Plot:
    traces, rows = [], []
    for index, overview in enumerate(overviews):
        for curve in overview.curves:
            if curve.name != name:
                continue
            bins = binned(getattr(curve, place), curve.values, _POINTS // 4, weights=curve.weights)
            trace = line(packed(bins.x), packed(bins.mean), line=worker_line(index), name=overview.name)
            traces.append({**trace, "mode": "lines+markers" if len(bins.x) <= 40 else "lines"})
            chosen = sorted(set(np.linspace(0, len(bins.x) - 1, min(_ROWS, len(bins.x))).astype(int).tolist()))
            rows += [(overview.name, _number(bins.x[each]), _number(bins.mean[each])) for each in chosen]
    return Plot(
        key=f"{name}-{place}",
        title=f"{name[:1].upper()}{name[1:]} against {'time' if place == 'seconds' else 'samples'}",
        summary=f"What the training script noted as {name}, over {axis}, one line per run.",
        traces=traces,
        # A single line is named too if there are other runs, which noted nothing.
        layout=layout(axis, name, showlegend=len(overviews) > 1),
        table=Table(caption=f"{name} over {axis}", headings=("run", axis, name), rows=rows),
    )


def staleness_plot(overview: RunOverview) -> Plot:
    """Versions committed between a pull and the matching push."""
    values = {worker: done.staleness for worker, done in overview.run.iterations.items()}
    what = "How many versions were committed between a worker's pull and its push"
    return _histogram(f"staleness-{overview.name}", values, "Staleness", what, "versions between pull and push")


def leads_plot(overview: RunOverview) -> Plot:
    """Iterations ahead of the slowest, at each release."""
    values = {worker: done.lead for worker, done in overview.run.iterations.items()}
    what = "How many iterations a worker was ahead of the slowest when it was released"
    return _histogram(f"lead-{overview.name}", values, "Lead", what, "iterations ahead of the slowest")


def _histogram(key: str, values: dict[int, FloatArray], title: str, what: str, axis: str) -> Plot:
    named = {f"worker {worker}": each for worker, each in values.items()}
    if len(named) > MAX_WORKERS:
        named = {"all workers": np.concatenate(list(named.values()))}
    pushes = {name: np.maximum(each[np.isfinite(each)], 0.0) for name, each in named.items()}
    most = 1 + max((int(each.max()) for each in pushes.values() if len(each)), default=0)
    step = max(1, -(-most // _MAX_BARS))
    starts = [step * bar for bar in range(-(-most // step))]
    names = [str(each) if step == 1 else f"{each} to {min(each + step, most) - 1}" for each in starts]
    sums = {
        worker: np.bincount((each // step).astype(np.int64), minlength=len(starts)).tolist()
        for worker, each in pushes.items()
    }
    traces = [
        {
            "type": "bar", "x": names, "y": sums[worker], "name": worker,
            "marker": {"color": worker_colour(index), "pattern": {"shape": ("", "/", "x", "-")[index // 8 % 4]}},
        }
        for index, worker in enumerate(sums)
    ]  # fmt: skip
    return Plot(
        key=key,
        title=title,
        summary=f"{what}: a histogram of all pushes, stacked by worker.",
        traces=traces,
        layout=layout(axis, "pushes", height=280, barmode="stack", xaxis={"type": "category", "title": {"text": axis}}),
        table=Table(
            caption=f"{what}: pushes",
            headings=(axis, *sums),
            rows=[(name, *(str(each[index]) for each in sums.values())) for index, name in enumerate(names)],
        ),
        zooms=False,
    )
