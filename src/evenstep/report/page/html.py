"""Puts the blocks of a page into one HTML file that works offline, by keyboard and with a screen reader."""

import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import Final

from evenstep.core.errors import ConfigError
from evenstep.report.overview import RunOverview, compared
from evenstep.report.page.bar_plots import close_up_plot, side_by_side_plot
from evenstep.report.page.blocks import MAX_WORKERS, Plot, Table
from evenstep.report.page.lane_plots import lanes_plot
from evenstep.report.page.series_plots import curve_plots, leads_plot, sizes_plot, speeds_plot, staleness_plot
from evenstep.report.page.tables import events_table, runs_table, workers_table

# Nothing is loaded from anywhere, whatever a library in the page does.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def page_html(overviews: Sequence[RunOverview], *, version: str, title: str = "evenstep report") -> str:
    """The page of these runs; the others are compared with the first. `version` is evenstep's.

    Raises:
        ConfigError: plotly is not installed.
    """
    script = _plotly_script()
    compared, plots = _compared(overviews), {each.name: plots_of(each) for each in overviews}
    body = "\n".join(
        [
            _header(overviews, title),
            "<main id=main>",
            _comparison(overviews, compared),
            *(_run(index, each, plots[each.name], alone=len(overviews) == 1) for index, each in enumerate(overviews)),
            "</main>",
            f"<footer>evenstep {escape(version)}. Everything here is worked out from the events of the runs.</footer>",
        ]
    )
    values = {plot.key: _values(plot) for plot in (*compared, *(plot for each in plots.values() for plot in each))}
    return _DOCUMENT.format(
        policy=_POLICY,
        title=escape(title),
        style=_file("page.css"),
        body=body,
        # No name in it can end the script element.
        values=json.dumps(values, separators=(",", ":")).replace("<", "\\u003c"),
        plotly=script,
        script=_file("page.js"),
    )


def plots_of(overview: RunOverview) -> list[Plot]:
    """The plots of one run, in the order of the page."""
    plots = [lanes_plot(overview), close_up_plot(overview), sizes_plot(overview), speeds_plot(overview)]
    if overview.run.servers is not None:
        plots += [staleness_plot(overview), leads_plot(overview)]
    return plots


def all_plots(overviews: Sequence[RunOverview]) -> list[Plot]:
    """Every plot of the page."""
    return [*_compared(overviews), *(plot for each in overviews for plot in plots_of(each))]


def _compared(overviews: Sequence[RunOverview]) -> list[Plot]:
    """The plots of all runs together."""
    side_by_side = [side_by_side_plot(overviews)] if len(overviews) > 1 else []
    return [*side_by_side, *curve_plots(overviews)]


_DOCUMENT = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
{body}
<script type="application/json" id="plots">{values}</script>
<script>{plotly}</script>
<script>
{script}</script>
</body>
</html>
"""


def _plotly_script() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as error:
        raise ConfigError("a report as a page needs plotly: pip install 'evenstep[report]'") from error
    return str(get_plotlyjs())


def _file(name: str) -> str:
    return files("evenstep.report.page").joinpath(name).read_text(encoding="utf-8")


def _values(plot: Plot) -> dict[str, object]:
    return {
        "traces": plot.traces,
        "layout": plot.layout,
        "choices": plot.choices,
        "finer": plot.finer,
        "zooms": plot.zooms,
    }


# The parts of the body.


def _header(overviews: Sequence[RunOverview], title: str) -> str:
    links = "".join(f'<li><a href="#run-{index}">{escape(each.name)}</a></li>' for index, each in enumerate(overviews))
    about = f"{len(overviews)} runs" if len(overviews) > 1 else "One run"
    simulated = sum(each.run.simulated for each in overviews)
    if simulated:
        about += ", simulated" if simulated == len(overviews) else f", {simulated} of them simulated"
    return (
        f'<a class="skip" href="#main">Skip to the report</a>\n<header>\n<h1>{escape(title)}</h1>\n'
        f"{_conclusion(overviews)}<p>{about}.</p>\n"
        f'<nav aria-label="Runs"><ul>{links}</ul></nav>\n<p class="keys">By keyboard: Tab goes to a plot,'
        " <kbd>+</kbd> and <kbd>-</kbd> zoom, arrows move, <kbd>0</kbd> shows all.</p>\n</header>"
    )


def _conclusion(overviews: Sequence[RunOverview]) -> str:
    """How several runs compare, or the verdict on a single run."""
    text = compared(overviews) if len(overviews) > 1 else overviews[0].verdict.text
    return f'<p class="conclusion">{escape(text)}</p>\n'


def _comparison(overviews: Sequence[RunOverview], plots: Iterable[Plot]) -> str:
    parts = []
    if len(overviews) > 1:
        parts.append(_table(runs_table(overviews)))
    parts += [_plot(plot) for plot in plots]
    if not parts:
        return ""
    heading = "All runs together" if len(overviews) > 1 else "What the script noted"
    return f'<section aria-labelledby="all">\n<h2 id="all">{heading}</h2>\n' + "\n".join(parts) + "\n</section>"


def _run(index: int, overview: RunOverview, plots: Sequence[Plot], *, alone: bool) -> str:
    return "\n".join(
        [
            f'<section aria-labelledby="run-{index}">',
            f'<h2 id="run-{index}">{escape(_heading(overview))}</h2>',
            "" if alone else f'<p class="verdict">{escape(overview.verdict.text)}</p>',  # The header has it.
            _figures(overview),
            _left_out(overview),
            _plot(plots[0]),
            _workers(overview),
            *(_plot(plot) for plot in plots[1:]),
            _events(overview),
            "</section>",
        ]
    )


def _heading(overview: RunOverview) -> str:
    scheme = "" if overview.name == overview.run.scheme else f": {overview.run.scheme}"
    return f"{overview.name}{scheme}{overview.run.kind}"


def _figures(overview: RunOverview) -> str:
    gain, summary = overview.gain, overview.summary
    figures = [
        (f"{summary.samples_per_second:,.0f}", "samples/s"),
        (f"{overview.waiting_share:.0%}", "of the workers' time is waiting"),
    ]
    if gain.speed_up is not None and gain.speed_up.low < gain.speed_up.high:
        figures.append((f"{gain.speed_up}", "times as fast as with equal sizes"))
    figures += [
        (f"{gain.of_ideal:.0%}", "of the ideal, where no worker waits or communicates"),
        (f"{summary.iterations:,}", f"iterations in {_seconds(summary.training_seconds)}"),
        (f"{len(overview.workers)}", f"workers, global batch {overview.run.global_batch_size:,}"),
    ]
    cells = "".join(f"<div><dt>{escape(what)}</dt><dd>{escape(value)}</dd></div>" for value, what in figures)
    return f'<dl class="figures">{cells}</dl>'


def _left_out(overview: RunOverview) -> str:
    count, half = len(overview.workers), MAX_WORKERS // 2
    if count <= MAX_WORKERS:
        return ""
    return (
        f"<p>Of {count:,} workers the {half} that waited least and the {half} that waited most are drawn; the tables of"
        " workers have all.</p>"
    )


def _workers(overview: RunOverview) -> str:
    table = _table(workers_table(overview))
    if len(overview.workers) <= _OPEN_ROWS:
        return table
    return f"<details><summary>All {len(overview.workers):,} workers</summary>{table}</details>"


def _events(overview: RunOverview) -> str:
    table = events_table(overview)
    shown = _table(table) if table.rows else "<p>Nothing that stands out.</p>"
    opened = " open" if len(table.rows) <= _OPEN_ROWS else ""
    return f"<details{opened}><summary><h3>What happened</h3></summary>{shown}</details>"


_OPEN_ROWS: Final = 16


def _seconds(seconds: float) -> str:
    text = f"{seconds:,.1f} s" if seconds >= 1 else f"{1000 * seconds:,.3g} ms"
    return text.replace(" ", "\N{NO-BREAK SPACE}")


_ZOOMS: Final = (
    ("in", "Zoom in", "+"),
    ("out", "Zoom out", "&minus;"),
    ("left", "Earlier", "&larr;"),
    ("right", "Later", "&rarr;"),
    ("all", "The whole run", "all"),
)


def _plot(plot: Plot) -> str:
    key = escape(plot.key, quote=True)
    tools = ""
    if plot.choices:
        options = "".join(f"<option>{escape(name)}</option>" for name in plot.choices)
        tools = f'<label>Show <select data-choose="{key}">{options}</select></label>'
    if plot.zooms and plot.finer is not None:
        tools += "".join(
            f'<button type="button" data-zoom="{name}" data-plot="{key}" aria-label="{label}">{sign}</button>'
            for name, label, sign in _ZOOMS
        )
    return (
        f'<figure>\n<figcaption><h3>{escape(plot.title)}</h3><div class="tools">{tools}</div></figcaption>\n'
        f'<div class="plot" id="{key}" role="img" tabindex="0" aria-label="{escape(plot.summary, quote=True)}"></div>\n'
        f"<details><summary>The numbers as a table</summary>{_table(plot.table)}</details>\n</figure>"
    )


def _table(table: Table) -> str:
    caption = escape(table.caption)
    words = len(table.headings) - table.words
    head = "".join(
        f'<th scope="col"{_WORDS if column >= words else ""}>{escape(each)}</th>'
        for column, each in enumerate(table.headings)
    )
    rows = "\n".join(f"<tr>{_cells(row, words)}</tr>" for row in table.rows)
    return (
        f'<div class="table" role="region" tabindex="0" aria-label="{escape(table.caption, quote=True)}">'
        f"<table><caption>{caption}</caption><thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table></div>"
    )


_WORDS: Final = ' class="words"'


def _cells(row: Sequence[str], words: int) -> str:
    first, *others = row
    cells = "".join(
        f"<td{_WORDS if column >= words else ''}>{escape(cell)}</td>" for column, cell in enumerate(others, start=1)
    )
    return f'<th scope="row">{escape(first)}</th>{cells}'
