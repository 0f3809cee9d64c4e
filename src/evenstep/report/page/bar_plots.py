"""Single iterations: of one run in a few places, and of several runs side by side."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from evenstep.report.iterations import Part
from evenstep.report.overview import RunOverview
from evenstep.report.page.blocks import (
    MAX_WORKERS,
    PART_COLOURS,
    WAIT_PATTERN,
    Plot,
    Table,
    Trace,
    layout,
    shown_workers,
)

_CLOSE_UP_ITERATIONS: Final = 8


def close_up_plot(overview: RunOverview) -> Plot:
    """Single iterations in a few stretches of the run, as bars with their samples."""
    length = _stretch_seconds(overview)
    stretches = _stretches(overview, length)
    choices = {
        name: _bars([(overview, "", begin)], length, MAX_WORKERS, zero=False) for name, begin in stretches.items()
    }
    workers = [str(worker) for worker in shown_workers(overview)]
    first = next(iter(choices))
    return Plot(
        key=f"close-{overview.name}",
        title="Iterations close up",
        summary=f"What each worker did in about {_CLOSE_UP_ITERATIONS} iterations in a row, and how many samples each"
        " computed on; the stretches can be chosen.",
        traces=choices[first],
        layout=_bars_layout(workers, "seconds since the run began"),
        table=_iterations_table(overview, stretches[first], length),
        choices=choices,
    )


def side_by_side_plot(overviews: Sequence[RunOverview]) -> Plot:
    """An ordinary stretch of each run, on one axis of time."""
    length = min(_stretch_seconds(each) for each in overviews) * 1.5
    rows = [(each, f"{each.name} ", _ordinary(each, length)) for each in overviews]
    most = max(2, MAX_WORKERS // len(overviews))
    lanes = {
        f"{each.name} {worker}": each.run.iterations[worker]
        for each in overviews
        for worker in shown_workers(each, most)
    }
    table = Table(
        caption="The average iteration of each worker, in milliseconds",
        headings=("run and worker", *(part.value for part in PART_COLOURS)),
        rows=[
            (name, *(f"{1000 * done.parts[part].mean():.1f}" for part in PART_COLOURS)) for name, done in lanes.items()
        ],
    )
    return Plot(
        key="side-by-side",
        title="The runs side by side",
        summary="The same time out of the middle of each run: what every worker computes, and how long it waits.",
        traces=_bars(rows, length, most, zero=True),
        layout=_bars_layout(list(lanes), "seconds"),
        table=table,
    )


def _bars_layout(names: Sequence[str], x_title: str) -> dict[str, Any]:
    return layout(
        x_title,
        "worker",
        height=120 + max(20, min(40, 400 // len(names))) * len(names),
        barmode="overlay",
        bargap=0.2,
        yaxis={
            "type": "category",
            "categoryorder": "array",
            "categoryarray": list(reversed(names)),
            "fixedrange": True,
            "automargin": True,
        },
    )


def _stretch_seconds(overview: RunOverview) -> float:
    usual = np.median([np.median(each.iteration_seconds) for each in overview.run.iterations.values()])
    return float(usual) * _CLOSE_UP_ITERATIONS


def _stretches(overview: RunOverview, length: float) -> dict[str, float]:
    """When each stretch starts, by its name."""
    last = max(0.0, overview.times.seconds - length)
    begins = {"an ordinary stretch": _ordinary(overview, length), "the beginning": 0.0}
    if overview.moves:
        begins["the last change of sizes"] = min(last, max(0.0, overview.moves[-1].seconds - length / 2))
    longest = max(overview.run.workers, key=lambda each: overview.run.iterations[each].iteration_seconds.max())
    index = int(overview.run.iterations[longest].iteration_seconds.argmax())
    begins["the longest iteration"] = min(last, max(0.0, float(overview.times.began[longest][index]) - length / 4))
    return {**begins, "the end": last}


def _ordinary(overview: RunOverview, length: float) -> float:
    """The start of the stretch in the run's second half whose duration is closest to the median."""
    worker = overview.run.workers[0]
    done, began = overview.run.iterations[worker], overview.times.began[worker]
    half = len(done) // 2
    count = max(2, round(length / float(np.median(done.iteration_seconds))))
    if len(began) - count <= half:
        return max(0.0, (overview.times.seconds - length) / 2)
    spans = began[half + count :] - began[half : len(began) - count]
    return float(began[half + int(np.abs(spans - np.median(spans)).argmin())])


def _bars(rows: Sequence[tuple[RunOverview, str, float]], length: float, most: int, *, zero: bool) -> list[Trace]:
    """A trace per part, over all runs and at most `most` workers of each."""
    bars: dict[Part, dict[str, list[Any]]] = {
        part: {"y": [], "base": [], "x": [], "text": [], "hovertext": []} for part in PART_COLOURS
    }
    for overview, prefix, begin in rows:
        for worker in shown_workers(overview, most):
            _add_bars(bars, overview, worker, f"{prefix}{worker}", begin, begin + length, begin if zero else 0.0)
    traces = []
    for part, each in bars.items():
        trace: Trace = {
            "type": "bar", "orientation": "h", "name": part.value, **each, "hoverinfo": "text",
            "marker": {"color": PART_COLOURS[part]}, "textposition": "inside", "insidetextanchor": "middle",
            "textangle": 0, "constraintext": "inside",
        }  # fmt: skip
        if part is Part.WAIT:
            trace["marker"] |= {"pattern": {**WAIT_PATTERN, "fgcolor": PART_COLOURS[part], "bgcolor": "#fff0"}}
        traces.append(trace)
    return traces


def _add_bars(
    bars: dict[Part, dict[str, list[Any]]],
    overview: RunOverview,
    worker: int,
    name: str,
    begin: float,
    end: float,
    shift: float,
) -> None:
    began = overview.times.began[worker]
    shown = slice(max(0, int(np.searchsorted(began, begin, side="right")) - 1), int(np.searchsorted(began, end)))
    done = overview.run.iterations[worker][shown]
    parts = done.parts
    for index, at in enumerate(began[shown].tolist()):
        for part, column in parts.items():
            seconds = float(column[index])
            left, right = max(at, begin), min(at + seconds, end)
            at += seconds
            if right - left <= 1e-4 * (end - begin):
                continue
            bar = bars[part]
            bar["y"].append(name)
            bar["base"].append(round(left - shift, 6))
            bar["x"].append(round(right - left, 6))
            samples = int(done.samples[index])
            bar["text"].append(str(samples) if part is Part.COMPUTE else "")
            bar["hovertext"].append(
                f"worker {worker}, iteration {int(done.numbers[index])}<br>{part.value} {1000 * seconds:.2f} ms"
                f"<br>{samples} samples"
            )


def _iterations_table(overview: RunOverview, begin: float, length: float) -> Table:
    rows = []
    for worker in shown_workers(overview):
        done, began = overview.run.iterations[worker], overview.times.began[worker]
        parts = done.parts
        for index in np.flatnonzero((began >= begin) & (began < begin + length))[:_CLOSE_UP_ITERATIONS]:
            milliseconds = (f"{1000 * float(parts[part][index]):.1f}" for part in PART_COLOURS)
            rows.append((str(worker), str(int(done.numbers[index])), str(int(done.samples[index])), *milliseconds))
    return Table(
        caption="The iterations of an ordinary stretch, in milliseconds",
        headings=("worker", "iteration", "samples", *(part.value for part in PART_COLOURS)),
        rows=rows,
    )
