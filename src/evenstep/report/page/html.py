"""Puts the tables and plots of a page into one HTML file that works offline, by keyboard and with a screen reader."""

import json
from collections.abc import Sequence
from importlib.resources import files

from jinja2 import Environment, StrictUndefined

from evenstep.report.account.verdict import sentences
from evenstep.report.overview import RunOverview, about, compared
from evenstep.report.page.blocks import MAX_WORKERS
from evenstep.report.page.plots import plots_of, plots_together
from evenstep.report.page.tables import events_table, runs_table, workers_table


def page_html(overviews: Sequence[RunOverview], *, version: str, title: str = "evenstep report") -> str:
    """The page of these runs, which compares the others with the first. `version` is evenstep's."""
    together, plots = plots_together(overviews), [plots_of(each) for each in overviews]
    verdicts = ["\n".join([*sentences(each.summary.verdict.text), *sentences(each.next)]) for each in overviews]
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    values = {
        plot.key: {"traces": plot.traces, "layout": plot.layout}
        for plot in (*together, *(plot for each in plots for plot in each))
    }
    return environment.from_string(_file("page.html")).render(
        title=title,
        version=version,
        conclusion=compared(overviews) if len(overviews) > 1 else verdicts[0],
        verdicts=verdicts,
        about=[about(each.run) for each in overviews],
        overviews=overviews,
        runs=runs_table(overviews),
        together=together,
        plots=plots,
        workers=[workers_table(each) for each in overviews],
        events=[events_table(each) for each in overviews],
        most=MAX_WORKERS,
        style=_file("page.css"),
        plotly=_file("plotly-basic.min.js"),
        script=_file("page.js"),
        # Escaped so that no name in it can end the script element.
        values=json.dumps(values, separators=(",", ":")).replace("<", "\\u003c"),
    )


def _file(name: str) -> str:
    return files("evenstep.report.page").joinpath(name).read_text(encoding="utf-8")
