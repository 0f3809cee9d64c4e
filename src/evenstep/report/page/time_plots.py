"""The use of time: each worker's lane over the whole run, and single iterations as bars."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from evenstep.report.account.account import Part
from evenstep.report.iterations import FloatArray, Iterations, joined
from evenstep.report.overview import RunOverview
from evenstep.report.page.blocks import MAX_WORKERS, POINTS, TIME, Options, Plot, lanes_of, layout_of, line
from evenstep.report.page.tables import Table, parts_table
from evenstep.report.stretches import shares

_CLOSE_UP_ITERATIONS: Final = 8  # So many bars in a row are wide enough for their samples.
_LANE: Final = 0.84  # Of the distance between two lanes.
_PART_COLOURS: Final[Mapping[Part, str]] = {
    Part.COMPUTE: "#3d85c6",
    Part.INPUT: "#a560c8",
    Part.COMMUNICATION: "#3f9d8f",
    Part.SCRIPT: "#8c959f",
    Part.WAIT: "#dd9b13",
}
"""Colours for light and dark backgrounds, in stacking order."""
_HATCHED: Final[Options] = {"shape": "/", "size": 6, "solidity": 0.25, "fgcolor": _PART_COLOURS[Part.WAIT]}
"""Waiting is hatched, so that it differs from work even without colours."""

# The use of time: each worker's lane over the whole run.


def lanes_plot(overview: RunOverview) -> Plot:
    """A lane for each worker, whose height is divided by the worker's activities at each moment."""
    lanes, seconds = lanes_of(overview), overview.run.seconds
    stretches = min(POINTS, 8 * max(map(len, lanes.values())))
    edges = np.linspace(0.0, max(seconds, 1e-9), stretches + 1)
    worst = max(overview.summary.workers, key=lambda each: each.waiting_share)
    return Plot(
        key=f"lanes-{overview.name}",
        title="Where the time went",
        summary=f"One lane per worker over {seconds:.4g} seconds: the part of each moment that went on input, compute,"
        f" waiting, communication and the script. Worker {worst.worker} waited most, {worst.waiting_share:.0%} of its"
        " time.",
        traces=[trace for row, done in enumerate(lanes.values()) for trace in _lane(edges, shares(done, edges), row)],
        layout=layout_of(
            TIME,
            "",
            height=110 + max(26, min(64, 340 // len(lanes))) * len(lanes),
            y={
                "tickvals": [-row for row in range(len(lanes))],
                "ticktext": [*lanes],
                "range": [0.6 - len(lanes), 0.55],
                "fixedrange": True,
                "showgrid": False,
            },
        ),
        table=parts_table(overview, _PART_COLOURS),
    )


def _lane(edges: FloatArray, parts: Mapping[Part, FloatArray], row: int) -> list[Options]:
    """The traces of one lane: its base line, and the upper edge of each part, filled down to the edge below."""
    bottom, upper = -row - _LANE / 2, np.zeros(len(edges) - 1)
    traces = [line(edges[[0, -1]], [bottom] * 2, hoverinfo="skip", showlegend=False, line={"width": 0})]
    for part, colour in _PART_COLOURS.items():
        upper = np.minimum(upper + parts[part], 1.0)
        trace = line(
            edges, bottom + _LANE * np.append(upper, upper[-1]), fill="tonexty", fillcolor=colour,
            line={"width": 0, "shape": "hv"}, name=part.value, legendgroup=part.value, showlegend=row == 0,
            hoverinfo="name",
        )  # fmt: skip
        if part is Part.WAIT:
            trace["fillpattern"] = {**_HATCHED, "bgcolor": "rgba(221,155,19,0.18)"}
        traces.append(trace)
    return traces


# Single iterations, as bars: of one run in a few places, and of several runs side by side.


def close_up_plot(overview: RunOverview) -> Plot:
    """Single iterations in a few stretches of the run, with their samples."""
    length = _stretch_seconds(overview)
    views = {name: (begin, begin + length) for name, begin in _stretches(overview, length).items()}
    lanes = {name: _within(done, views.values()) for name, done in lanes_of(overview).items()}
    return _bars_plot(
        f"close-{overview.name}",
        "Iterations close up",
        f"What each worker did in about {_CLOSE_UP_ITERATIONS} iterations in a row, and how many samples each computed"
        " on; the stretches can be chosen.",
        TIME,
        lanes,
        views,
    )


def side_by_side_plot(overviews: Sequence[RunOverview]) -> Plot:
    """A typical stretch of each run, on one time axis: 12 iterations of the fastest."""
    length = min(_stretch_seconds(each, 12) for each in overviews)
    most = max(2, MAX_WORKERS // len(overviews))
    lanes = {}
    for each in overviews:
        begin = _ordinary(each, length)
        for name, done in lanes_of(each, most).items():
            within = _within(done, [(begin, begin + length)])
            lanes[name.replace("worker", each.name)] = replace(within, began=within.began - begin)
    return _bars_plot(
        "side-by-side",
        "The runs side by side",
        "The same time out of the middle of each run: what every worker computes, and how long it waits.",
        "seconds",
        lanes,
        {"": (0.0, length)},
    )


def _within(done: Iterations, stretches: Iterable[Sequence[float]]) -> Iterations:
    """The iterations that overlap any of these stretches of time."""
    ends = done.began + done.iteration_seconds
    return done[np.any([(done.began < end) & (ends > begin) for begin, end in stretches], axis=0)]


def _bars_plot(
    key: str,
    title: str,
    summary: str,
    x_title: str,
    lanes: Mapping[str, Iterations],
    views: Mapping[str, Sequence[float]],
) -> Plot:
    """The iterations of lanes by name: one trace per part, with the parts of an iteration in sequence."""
    names = [name for name, done in lanes.items() for _ in range(len(done))]
    together = joined(lanes.values())
    rows = [
        {"worker": name, "iteration": f"{number:.0f}", "samples": f"{size:.0f}"}
        for name, number, size in zip(names, together.numbers, together.samples, strict=True)
    ]
    traces, starts = [], together.began
    for part, seconds in together.parts.items():
        trace: Options = {
            "type": "bar", "orientation": "h", "name": part.value, "y": names, "base": starts.round(6).tolist(),
            "x": seconds.round(6).tolist(), "marker": {"color": _PART_COLOURS[part]},
            "hovertext": [
                f"{row['worker']}, iteration {row['iteration']}<br>{part.value} {1000 * each:.2f} ms"
                f"<br>{row['samples']} samples"
                for row, each in zip(rows, seconds, strict=True)
            ],
            "hoverinfo": "text",
        }  # fmt: skip
        if part is Part.WAIT:
            trace["marker"] |= {"pattern": {**_HATCHED, "bgcolor": "#fff0"}}
        if part is Part.COMPUTE:
            trace |= {
                "text": [row["samples"] for row in rows], "textposition": "inside", "insidetextanchor": "middle",
                "textangle": 0, "constraintext": "inside",
            }  # fmt: skip
        traces.append(trace)
        for row, each in zip(rows, seconds, strict=True):
            row[part.value] = f"{1000 * each:.1f}"
        starts = starts + seconds
    layout = layout_of(
        x_title,
        "",
        height=120 + max(20, min(40, 400 // len(lanes))) * len(lanes),
        x={"range": next(iter(views.values()))},
        y={"type": "category", "categoryorder": "array", "categoryarray": [*reversed([*lanes])], "fixedrange": True},
        barmode="overlay",
        bargap=0.2,
    )
    return Plot(
        key=key,
        title=title,
        summary=summary,
        traces=traces,
        layout=layout,
        table=Table(caption="The iterations that are drawn, in milliseconds", rows=rows),
        views=views if len(views) > 1 else {},
    )


def _stretch_seconds(overview: RunOverview, iterations: int = _CLOSE_UP_ITERATIONS) -> float:
    """The usual seconds of so many iterations, or of as many as an epoch has before its last, which may be short."""
    before_last = max(overview.run.iterations_per_epoch - 1, 2)
    usual = np.median([np.median(each.iteration_seconds) for each in overview.run.iterations.values()])
    return float(usual) * min(iterations, before_last)


def _stretches(overview: RunOverview, length: float) -> dict[str, float]:
    """The start of each stretch, by name."""
    last, together = max(0.0, overview.run.seconds - length), joined(overview.run.iterations.values())
    begins = {"an ordinary stretch": _ordinary(overview, length), "the beginning": 0.0}
    if overview.moves:
        begins["the last change of sizes"] = min(last, max(0.0, overview.moves[-1].seconds - length / 2))
    longest = float(together.began[together.iteration_seconds.argmax()])
    return {**begins, "the longest iteration": min(last, max(0.0, longest - length / 4)), "the end": last}


def _ordinary(overview: RunOverview, length: float) -> float:
    """The start of the stretch in the run's second half whose duration is closest to the median.

    Behind a barrier it lies inside an epoch if that is long enough: at its end slices are short, and scripts evaluate.
    """
    done = overview.run.iterations[overview.run.workers[0]]
    began = done.began
    half = len(done) // 2
    count = max(2, round(length / float(np.median(done.iteration_seconds))))
    if len(began) - count <= half:
        return max(0.0, (overview.run.seconds - length) / 2)
    starts = np.arange(half, len(began) - count)
    epochs = done.numbers // max(overview.run.iterations_per_epoch, 1)
    inside = epochs[starts] == epochs[starts + count]
    if overview.run.servers is None and inside.any():
        starts = starts[inside]
    spans = began[starts + count] - began[starts]
    return float(began[starts[np.abs(spans - np.median(spans)).argmin()]])
