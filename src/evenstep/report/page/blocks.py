"""The building blocks of a page's plots."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, final

import numpy as np
import numpy.typing as npt

from evenstep.report.iterations import Iterations
from evenstep.report.overview import RunOverview
from evenstep.report.page.tables import Table

Options: TypeAlias = dict[str, Any]
"""Input of plotly.js: a trace, a layout, or a part of them."""

MAX_WORKERS: Final = 32
"""The most workers in one plot; tables have all."""
POINTS: Final = 2000
"""The most points of a line or lane: a few for each pixel of a wide screen, so that zooming in shows more."""
TIME: Final = "seconds since the run began"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A plot, with a summary for readers who cannot see it, and its numbers as a table.

    `key` is unique in the page. `views` are selectable parts of the x axis, by name; the first is shown.
    """

    key: str
    title: str
    summary: str
    traces: Sequence[Options]
    layout: Options
    table: Table
    views: Mapping[str, Sequence[float]] = field(default_factory=dict)


def lanes_of(overview: RunOverview, most: int = MAX_WORKERS) -> dict[str, Iterations]:
    """The iterations of all workers by name; if there are more than `most`, of those that waited most and least.

    The name of the worker that the verdict is about says that it is slow.
    """
    by_waiting = [each.worker for each in sorted(overview.summary.workers, key=lambda each: each.waiting_share)]
    half = most // 2
    workers = sorted(by_waiting if len(by_waiting) <= most else by_waiting[:half] + by_waiting[-half:])
    return {f"worker {overview.marked(each)}": overview.run.iterations[each] for each in workers}


def layout_of(
    x_title: str,
    y_title: str,
    *,
    height: int = 320,
    x: Options | None = None,
    y: Options | None = None,
    **more: object,
) -> Options:
    """The layout of a plot, with further options for its axes; colours are in the page's style."""
    axis = {"zeroline": False, "automargin": True}
    return {
        "height": height,
        "margin": {"l": 64, "r": 40, "t": 12, "b": 48},
        "modebar": {"orientation": "v", "bgcolor": "rgba(0,0,0,0)"},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, -apple-system, Segoe UI, Roboto, Arial, sans-serif", "size": 13},
        "hovermode": "closest",
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        "xaxis": {**axis, "title": {"text": x_title}, **(x or {})},
        "yaxis": {**axis, "title": {"text": y_title}, **(y or {})},
        **more,
    }


def line(x: npt.ArrayLike, y: npt.ArrayLike, **more: object) -> Options:
    """A trace that is a line."""
    return {"type": "scatter", "mode": "lines", "x": _packed(x), "y": _packed(y), **more}


def _packed(values: npt.ArrayLike) -> Options:
    """Encode an array in the form that plotly.js reads fastest: 32-bit floats in base 64."""
    with np.errstate(over="ignore"):  # A damaged log may have larger values than any plot shows.
        raw = np.asarray(values, dtype="<f4").tobytes()
    return {"dtype": "f4", "bdata": base64.b64encode(raw).decode()}
