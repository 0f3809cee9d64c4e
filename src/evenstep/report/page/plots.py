"""Lists the plots of a page, and makes those of values over time."""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from evenstep.report.iterations import FloatArray, joined
from evenstep.report.overview import RunOverview
from evenstep.report.page.blocks import POINTS, TIME, Options, Plot, lanes_of, layout_of, line
from evenstep.report.page.tables import Table
from evenstep.report.page.time_plots import close_up_plot, lanes_plot, side_by_side_plot
from evenstep.report.recorded import RecordedRun
from evenstep.report.stretches import Bins, binned

_COLOURS: Final = ("#3d85c6", "#dd6b20", "#2f9e6e", "#c2509b", "#8b7be0", "#b8860b", "#1aa3b5", "#d64550")
_DASHES: Final = ("solid", "dash", "dot", "dashdot")
"""Dashes that distinguish lines of the same colour."""


def plots_together(overviews: Sequence[RunOverview]) -> list[Plot]:
    """The plots of all runs together: a typical stretch of each, and all values that the scripts noted."""
    names = dict.fromkeys(curve.name for each in overviews for curve in each.curves)
    axes = (("time", "seconds", TIME), ("samples", "samples", "samples trained on"))
    curves = [_curve_plot(overviews, name, *axis) for name in names for axis in axes]
    return [side_by_side_plot(overviews), *curves] if len(overviews) > 1 else curves


def plots_of(overview: RunOverview) -> list[Plot]:
    """The plots of one run, in the order of the page."""
    return [lanes_plot(overview), close_up_plot(overview), _sizes_plot(overview), _speeds_plot(overview)]


# Values over time.


def _sizes_plot(overview: RunOverview) -> Plot:
    whole, series = _whole_slices(overview.run), {}
    for name, done in lanes_of(overview).items():
        kept = done[np.isin(done.numbers, whole)]
        series[name] = binned(kept.began, kept.samples, POINTS)
    sizes = ", ".join(f"worker {each.worker} {each.last_batch_size}" for each in overview.summary.workers[:16])
    summary = f"The samples of each worker's iterations over time. At the end: {sizes}."
    layout = layout_of(TIME, "samples per iteration")
    return _series_plot(f"sizes-{overview.name}", "Batch sizes", summary, layout, series, shape="hv")


def _whole_slices(run: RecordedRun) -> FloatArray:
    """The numbers of the iterations with a whole global batch; of all iterations if that is not known."""
    together = joined(run.iterations.values())
    numbers, at = np.unique(together.numbers, return_inverse=True)
    totals = np.bincount(at, weights=together.samples, minlength=len(numbers))
    whole = numbers[totals >= run.global_batch_size]
    return whole if len(whole) and run.servers is None and not run.unrecorded else numbers


def _speeds_plot(overview: RunOverview) -> Plot:
    series = {}
    for name, done in lanes_of(overview).items():
        computed = (done.samples > 0) & (done.compute_seconds > 0)
        speed = np.where(computed, done.samples / np.where(computed, done.compute_seconds, 1.0), np.nan)
        series[name] = binned(done.began, speed, POINTS)
    layout = layout_of(TIME, "samples/s of compute", y={"rangemode": "tozero"})
    summary = "Samples per second of pure compute of each worker over time."
    return _series_plot(f"speeds-{overview.name}", "Speeds", summary, layout, series)


def _curve_plot(overviews: Sequence[RunOverview], name: str, against: str, place: str, axis: str) -> Plot:
    """The values that the scripts of all runs noted by this name."""
    # Even a single line is named if there are other runs, which noted nothing.
    layout = layout_of(axis, name, showlegend=len(overviews) > 1)
    return _series_plot(
        f"{name}-{place}",
        f"{name[:1].upper()}{name[1:]} against {against}",
        f"What the training script noted as {name}, over {axis}, one line per run.",
        layout,
        {
            overview.name: binned(getattr(curve, place), curve.values, POINTS // 4, weights=curve.weights)
            for overview in overviews
            for curve in overview.curves
            if curve.name == name
        },
    )


def _series_plot(
    key: str, title: str, summary: str, layout: Options, series: Mapping[str, Bins], *, shape: str = "linear"
) -> Plot:
    """Lines by name, each within the band of its smallest and largest values if a point stands for several."""
    traces = []
    for index, (name, bins) in enumerate(series.items()):
        colour, group = _COLOURS[index % 8], {"legendgroup": name}
        if not np.array_equal(bins.least, bins.largest) and len(series) <= len(_COLOURS):  # More hide each other.
            edge = {**group, "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False}
            band = {"fill": "tonexty", "fillcolor": f"{colour}33"}
            traces += [line(bins.x, bins.least, **edge), line(bins.x, bins.largest, **edge, **band)]
        style = {"color": colour, "dash": _DASHES[index // 8 % 4], "width": 1.8, "shape": shape}
        mode = "lines+markers" if len(bins.x) <= 40 else "lines"  # More markers run together.
        traces.append(line(bins.x, bins.mean, name=name, mode=mode, line=style, **group))
    return Plot(
        key=key, title=title, summary=summary, traces=traces, layout=layout, table=_series_table(title, layout, series)
    )


def _series_table(title: str, layout: Options, series: Mapping[str, Bins]) -> Table:
    """The means of lines in 24 stretches of the axis."""
    x_title, y_title = (layout[axis]["title"]["text"] for axis in ("xaxis", "yaxis"))
    edges = np.linspace(0.0, max((float(bins.x[-1]) for bins in series.values() if len(bins.x)), default=0.0), 24)
    rows = [{f"from {x_title}": _number(edge)} for edge in edges]
    for name, bins in series.items():
        index = np.searchsorted(edges, bins.x, side="right") - 1
        for number in np.unique(index).tolist():
            rows[number][name] = _number(float(bins.mean[index == number].mean()))
    return Table(caption=f"{title}: the mean {y_title} over {x_title}", rows=rows)


def _number(value: float) -> str:
    """Format with four digits, or all digits before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
