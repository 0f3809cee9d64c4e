"""How often: histograms of how stale pushes were and how far ahead their workers ran."""

from typing import Final

import numpy as np

from evenstep.report.iterations import FloatArray
from evenstep.report.overview import RunOverview
from evenstep.report.page.blocks import Plot, Table, layout, worker_colour
from evenstep.report.page.shown import MAX_WORKERS

_BARS: Final = 60


def staleness_plot(overview: RunOverview) -> Plot:
    """Versions committed between a pull and the matching push."""
    return _histogram(
        overview,
        "staleness",
        "Staleness",
        "How many versions were committed between a worker's pull and its push",
        "versions between pull and push",
    )


def leads_plot(overview: RunOverview) -> Plot:
    """Iterations ahead of the slowest, at each release."""
    return _histogram(
        overview,
        "lead",
        "Lead",
        "How many iterations a worker was ahead of the slowest when it was released",
        "iterations ahead of the slowest",
    )


def _pushes(overview: RunOverview, column: str) -> dict[str, FloatArray]:
    """The values of each worker's pushes, or of very many workers' together."""
    each = {f"worker {worker}": getattr(done, column) for worker, done in overview.run.iterations.items()}
    return each if len(each) <= MAX_WORKERS else {"all workers": np.concatenate(list(each.values()))}


def _histogram(overview: RunOverview, column: str, title: str, what: str, axis: str) -> Plot:
    pushes = {name: np.maximum(each[np.isfinite(each)], 0.0) for name, each in _pushes(overview, column).items()}
    most = 1 + max((int(each.max()) for each in pushes.values() if len(each)), default=0)
    step = max(1, -(-most // _BARS))
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
        key=f"{column}-{overview.name}",
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
