"""What a page is made of: tables and plots, as values that know nothing of HTML."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, final

import numpy as np
import numpy.typing as npt

from evenstep.report.iterations import Part
from evenstep.report.overview import RunOverview

Trace: TypeAlias = dict[str, Any]
"""A trace as plotly.js takes it."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Texts in rows, of which the first is the row's heading. The last `words` columns hold words, not numbers."""

    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A plot, with a summary for readers who cannot see it, and its numbers as a table.

    `key` is unique in the page. `choices` are other traces to show instead, by name; `finer` is what the page's script
    needs to draw more detail after zooming in.
    """

    key: str
    title: str
    summary: str
    traces: Sequence[Trace]
    layout: Mapping[str, Any]
    table: Table
    choices: Mapping[str, Sequence[Trace]] = field(default_factory=dict)
    finer: Mapping[str, Any] | None = None
    zooms: bool = True


PART_COLOURS: Final[Mapping[Part, str]] = {
    Part.COMPUTE: "#3d85c6",
    Part.INPUT: "#a560c8",
    Part.COMMUNICATION: "#3f9d8f",
    Part.SCRIPT: "#8c959f",
    Part.WAIT: "#dd9b13",
}
"""For light and dark backgrounds; in the order in which they are stacked."""

WAIT_PATTERN: Final[Mapping[str, Any]] = {"shape": "/", "size": 6, "solidity": 0.25}
"""Waiting is hatched, so that it differs from work without colours too."""

_WORKER_COLOURS: Final = ("#3d85c6", "#dd6b20", "#2f9e6e", "#c2509b", "#8b7be0", "#b8860b", "#1aa3b5", "#d64550")
_DASHES: Final = ("solid", "dash", "dot", "dashdot")


def worker_line(index: int) -> dict[str, Any]:
    """The line of one worker, or run; dashes tell lines of the same colour apart."""
    return {"color": _WORKER_COLOURS[index % 8], "dash": _DASHES[index // 8 % 4], "width": 1.8}


def worker_colour(index: int) -> str:
    """The colour of that line."""
    return _WORKER_COLOURS[index % 8]


def line(x: Any, y: Any, **more: Any) -> Trace:  # noqa: ANN401 - plotly.js's own options
    """A line trace."""
    return {"type": "scatter", "mode": "lines", "x": x, "y": y, **more}


def packed(values: npt.ArrayLike) -> dict[str, str]:
    """An array as plotly.js reads it fastest: 32-bit floats in base 64."""
    with np.errstate(over="ignore"):  # A damaged log may have larger values than any plot shows.
        raw = np.asarray(values, dtype="<f4").tobytes()
    return {"dtype": "f4", "bdata": base64.b64encode(raw).decode()}


def layout(
    x_title: str,
    y_title: str,
    *,
    height: int = 320,
    **more: Any,  # noqa: ANN401 - plotly.js's own options
) -> dict[str, Any]:
    """The layout of all plots; the page's script adds the colours."""
    return {
        "height": height,
        "margin": {"l": 64, "r": 12, "t": 12, "b": 48},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, -apple-system, Segoe UI, Roboto, Arial, sans-serif", "size": 13},
        "hovermode": "closest",
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        "xaxis": {"title": {"text": x_title}, "zeroline": False, "automargin": True},
        "yaxis": {"title": {"text": y_title}, "zeroline": False, "automargin": True},
        **more,
    }


MAX_WORKERS: Final = 32
"""Workers in one plot; tables have all."""


def shown_workers(overview: RunOverview, most: int = MAX_WORKERS) -> list[int]:
    """All workers, or of more than `most` those that waited most and least."""
    by_waiting = sorted(overview.workers, key=lambda each: each.parts[Part.WAIT.value])
    if len(by_waiting) > most:
        half = most // 2
        by_waiting = by_waiting[:half] + by_waiting[-half:]
    return sorted(each.worker for each in by_waiting)
