"""Where the time of a run went: each worker's lane over the whole run."""

import base64
from typing import Final

import numpy as np

from evenstep.report.iterations import FloatArray, Part
from evenstep.report.overview import RunOverview
from evenstep.report.page.blocks import (
    PART_COLOURS,
    WAIT_PATTERN,
    Plot,
    Table,
    Trace,
    layout,
    line,
    packed,
    shown_workers,
)
from evenstep.report.stretches import levels, shares

_LEVELS: Final = (480, 3840, 30720)
"""Stretches of each division of the time: as many as a wide screen shows, and two finer ones for zooming."""
_LANE: Final = 0.84


def lanes_plot(overview: RunOverview) -> Plot:
    """A lane for each worker, whose height is divided by what the worker did at that moment."""
    workers = shown_workers(overview)
    count = max(len(overview.run.iterations[worker]) for worker in workers)
    divisions = levels(overview.times.seconds, count, _LEVELS)
    stacked = [np.array([_stack(overview, worker, edges) for worker in workers]) for edges in divisions]
    finer = {
        "seconds": float(divisions[0][-1]),
        "workers": len(workers),
        "height": _LANE,
        "levels": [
            {"bins": each.shape[2], "bytes": base64.b64encode(np.round(each * 255).astype(np.uint8).tobytes()).decode()}
            for each in stacked
        ],
    }
    worst = max(overview.workers, key=lambda each: each.parts[Part.WAIT.value])
    return Plot(
        key=f"lanes-{overview.name}",
        title="Where the time went",
        summary=f"One lane per worker over {overview.times.seconds:.4g} seconds: the part of each moment that went on"
        f" input, compute, waiting, communication and the script. Worker {worst.worker} waited most,"
        f" {worst.parts[Part.WAIT.value]:.0%} of its time.",
        traces=[trace for row, bounds in enumerate(stacked[0]) for trace in _lane(divisions[0], bounds, row)],
        layout=layout(
            "seconds since the run began",
            "worker",
            height=110 + max(26, min(64, 340 // len(workers))) * len(workers),
            yaxis={
                "tickvals": [-row for row in range(len(workers))],
                "ticktext": [str(worker) for worker in workers],
                "title": {"text": "worker"},
                "range": [0.6 - len(workers), 0.55],
                "fixedrange": True,
                "zeroline": False,
                "showgrid": False,
            },
        ),
        table=Table(
            caption="The parts of each worker's time",
            headings=("worker", *(part.value for part in PART_COLOURS)),
            rows=[
                (str(each.worker), *(f"{each.parts[part.value]:.1%}" for part in PART_COLOURS))
                for each in overview.workers
            ],
        ),
        finer=finer,
    )


def _stack(overview: RunOverview, worker: int, edges: FloatArray) -> FloatArray:
    """Where each part ends if they are stacked, 0 to 1; shape [parts, stretches]."""
    each = shares(overview.run.iterations[worker], overview.times.began[worker], edges)
    stacked: FloatArray = np.minimum(np.cumsum([each[part] for part in PART_COLOURS], axis=0), 1.0)
    return stacked


def _lane(edges: FloatArray, bounds: FloatArray, row: int) -> list[Trace]:
    """The traces of one lane: its base line, and the upper edge of each part, filled down to the one below."""
    bottom = -row - _LANE / 2
    ends = [edges[0], edges[-1]]
    traces = [line(ends, [bottom, bottom], hoverinfo="skip", showlegend=False, line={"width": 0})]
    x = packed(edges)
    for part, upper in zip(PART_COLOURS, bounds, strict=True):
        trace = line(
            x, packed(bottom + _LANE * np.append(upper, upper[-1])), fill="tonexty", fillcolor=PART_COLOURS[part],
            line={"width": 0, "shape": "hv"}, name=part.value, legendgroup=part.value, showlegend=row == 0,
            hoverinfo="name",
        )  # fmt: skip
        if part is Part.WAIT:
            trace["fillpattern"] = {**WAIT_PATTERN, "fgcolor": PART_COLOURS[part], "bgcolor": "rgba(221,155,19,0.18)"}
        traces.append(trace)
    return traces
