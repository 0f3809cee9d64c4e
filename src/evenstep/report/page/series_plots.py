"""Values over time: batch sizes, speeds beside what was predicted, and what the script noted down."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from evenstep.report.bins import Bins, binned
from evenstep.report.overview import RunOverview
from evenstep.report.page.blocks import Plot, Table, Trace, layout, packed, worker_colour, worker_line
from evenstep.report.page.shown import shown_workers

_POINTS: Final = 2000
"""Of a line at most: some for each pixel of a wide screen, so that there is more to see where somebody zooms in."""
_ROWS: Final = 24
_MAX_BANDS: Final = 8


def sizes_plot(overview: RunOverview) -> Plot:
    """The samples of each worker's iterations over time."""
    series = [
        binned(overview.times.began[worker], overview.run.iterations[worker].samples, _POINTS)
        for worker in shown_workers(overview)
    ]
    traces = [trace for index, bins in enumerate(series) for trace in _line(overview, index, bins, shape="hv")]
    return Plot(
        key=f"sizes-{overview.name}",
        title="Batch sizes",
        summary="The samples of each worker's iterations over time. At the end: "
        + ", ".join(f"worker {each.worker} {each.last_batch_size}" for each in overview.workers[:16])
        + ".",
        traces=traces,
        layout=layout("seconds since the run began", "samples per iteration"),
        table=_table(overview, series, "The mean samples per iteration over time", "{:.4g}"),
    )


def speeds_plot(overview: RunOverview) -> Plot:
    """The measured and the predicted speed of each worker over time."""
    measured, predicted = [], []
    for worker in shown_workers(overview):
        done, began = overview.run.iterations[worker], overview.times.began[worker]
        computed = (done.samples > 0) & (done.compute_seconds > 0)
        speed = np.where(computed, done.samples / np.where(computed, done.compute_seconds, 1.0), np.nan)
        measured.append(binned(began, speed, _POINTS))
        # What was told after an iteration is about the next one.
        predicted.append(binned(began[1:], 1.0 / done.pace[:-1], _POINTS))
    traces = [trace for index, bins in enumerate(measured) for trace in _line(overview, index, bins, shape="linear")]
    for index, bins in enumerate(predicted):
        if len(bins.x):
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "x": packed(bins.x),
                    "y": packed(bins.mean),
                    "line": {"color": worker_colour(index), "dash": "dot", "width": 1.2},
                    "showlegend": False,
                    "name": f"worker {shown_workers(overview)[index]}, predicted",
                    "legendgroup": str(index),
                }
            )
    return Plot(
        key=f"speeds-{overview.name}",
        title="Speeds, and what was predicted",
        summary="Samples per second of pure compute of each worker over time; dotted, what it predicted of itself from"
        " its samples alone (a fixed part of its time is not in that).",
        traces=traces,
        layout=layout(
            "seconds since the run began",
            "samples/s of compute",
            yaxis={"rangemode": "tozero", "title": {"text": "samples/s of compute"}, "automargin": True},
        ),
        table=_table(overview, measured, "The mean speed over time, in samples per second of compute", "{:.4g}"),
    )


def _line(overview: RunOverview, index: int, bins: Bins, *, shape: str) -> list[Trace]:
    """A worker's line, and around it the band between its least and largest values where several are in a point."""
    worker = shown_workers(overview)[index]
    line: Trace = {
        "type": "scatter", "mode": "lines", "x": packed(bins.x), "y": packed(bins.mean), "name": f"worker {worker}",
        "line": {**worker_line(index), "shape": shape}, "legendgroup": str(index),
    }  # fmt: skip
    if np.array_equal(bins.least, bins.largest) or len(shown_workers(overview)) > _MAX_BANDS:
        return [line]
    edge: Trace = {
        "type": "scatter", "mode": "lines", "x": packed(bins.x), "line": {"width": 0}, "hoverinfo": "skip",
        "showlegend": False, "legendgroup": str(index),
    }  # fmt: skip
    upper = {"y": packed(bins.largest), "fill": "tonexty", "fillcolor": f"{worker_colour(index)}33"}
    return [{**edge, "y": packed(bins.least)}, {**edge, **upper}, line]


def _table(overview: RunOverview, series: Sequence[Bins], caption: str, form: str) -> Table:
    """The mean of every worker in a few stretches of the run."""
    edges = np.linspace(0.0, overview.times.seconds, _ROWS + 1)
    columns = []
    for bins in series:
        index = np.searchsorted(edges, bins.x, side="right") - 1
        columns.append(
            [form.format(bins.mean[index == row].mean()) if (index == row).any() else "" for row in range(_ROWS)]
        )
    return Table(
        caption=caption,
        headings=("from second", *(f"worker {worker}" for worker in shown_workers(overview))),
        rows=[(f"{edges[row]:.4g}", *(column[row] for column in columns)) for row in range(_ROWS)],
    )


def curve_plots(overviews: Sequence[RunOverview]) -> list[Plot]:
    """Everything that the scripts noted down, of all runs, against time and against samples."""
    names = list(dict.fromkeys(curve.name for each in overviews for curve in each.curves))
    return [
        _curve_plot(overviews, name, place, axis)
        for name in names
        for place, axis in (("seconds", "seconds since the run began"), ("samples", "samples trained on"))
    ]


def _curve_plot(overviews: Sequence[RunOverview], name: str, place: str, axis: str) -> Plot:
    traces, rows = [], []
    for index, overview in enumerate(overviews):
        for curve in overview.curves:
            if curve.name != name:
                continue
            bins = binned(getattr(curve, place), curve.values, _POINTS // 4, weights=curve.weights)
            mode = "lines+markers" if len(bins.x) <= 40 else "lines"
            traces.append(
                {
                    "type": "scatter",
                    "mode": mode,
                    "x": packed(bins.x),
                    "y": packed(bins.mean),
                    "line": worker_line(index),
                    "name": overview.name,
                }
            )
            chosen = sorted(set(np.linspace(0, len(bins.x) - 1, min(_ROWS, len(bins.x))).astype(int).tolist()))
            rows += [(overview.name, f"{bins.x[each]:.4g}", f"{bins.mean[each]:.4g}") for each in chosen]
    return Plot(
        key=f"{name}-{place}",
        title=f"{name[:1].upper()}{name[1:]} against {'time' if place == 'seconds' else 'samples'}",
        summary=f"What the training script noted as {name}, over {axis}, one line per run.",
        traces=traces,
        # A single line is named too where there are other runs, which noted nothing.
        layout=layout(axis, name, showlegend=len(overviews) > 1),
        table=Table(caption=f"{name} over {axis}", headings=("run", axis, name), rows=rows),
    )
