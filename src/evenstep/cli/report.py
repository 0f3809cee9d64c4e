"""`evenstep report`: one HTML file that shows what happened in one run or in several, side by side."""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from evenstep import __version__
from evenstep.advice import balancing, measured_machines
from evenstep.cli.arguments import Parser, as_path, require_run_dir, require_writable, write_text
from evenstep.cli.simulated import plain_table
from evenstep.core.errors import ConfigError, naming
from evenstep.core.shown import printable
from evenstep.report.overview import RunOverview, compared, overview_of, values_of
from evenstep.report.page.tables import runs_table
from evenstep.report.recorded import read_run

_DESCRIPTION: Final = """\
Show what happened in a run, or in several side by side: who waited for whom, what was done about it, what it gained.

A run directory is what --run-dir of evenstep run, simulate or demo names, or run_dir of prepare; a folder of such
directories stands for all of them. The page is one file that needs no network. A run that still goes on, or was
killed, is shown up to its end."""


def main(arguments: list[str]) -> int:
    """Run the subcommand."""
    options = make_parser().parse(arguments)
    console = Console(stderr=True, highlight=False)
    output: Path | None = options.output
    if output is None and not options.json:
        output = Path("report.html")
    if output is not None:
        require_writable(output)
    overviews = _overviews([found for each in options.run_dirs for found in _runs_in(each)], console)
    if len(overviews) > 1:
        console.print(compared(overviews), markup=False, soft_wrap=True)
        console.print(_table(overviews))
    below = "  " if len(overviews) > 1 else ""
    for each in overviews:
        console.print(f"[bold]{escape(each.name)}[/bold]  {escape(each.summary.verdict.text)}", soft_wrap=True)
        if each.next:
            console.print(below + escape(each.next), soft_wrap=True)
        if each.summary.elastic is not None:
            console.print(f"{escape(each.name)}: {each.summary.elastic.text}", soft_wrap=True)
        if each.run.unrecorded:
            console.print(
                f"{escape(each.name)} has no iterations of {each.run.unrecorded} of its workers: all figures are those"
                " of the others. If another folder has them, copy all worker-*.jsonl into one.",
                soft_wrap=True,
            )
    if options.json:
        print(json.dumps([values_of(each) for each in overviews]))
    if output is not None:
        from evenstep.report.page import page_html

        with console.status("writing the page"):
            page = page_html(overviews, version=__version__)
            write_text(output, page)
        console.print(
            f"The report is in {output} ({len(page) / 1e6:.1f} MB): open it in a browser.", markup=False, soft_wrap=True
        )
    return 0


def make_parser() -> Parser:
    """Make the parser of the options."""
    parser = Parser(
        prog="evenstep report", description=_DESCRIPTION, example="evenstep report runs/a runs/b -o report.html"
    )
    add = parser.add_argument
    add("run_dirs", nargs="+", type=as_path, metavar="RUN_DIR", help="the others are compared with the first")
    add("-o", "--output", type=as_path, metavar="FILE.html", help="the page (report.html)")
    add("--json", action="store_true", help="print the numbers as JSON, without a page unless -o is given")
    return parser


def _overviews(folders: Sequence[Path], console: Console) -> list[RunOverview]:
    """Return the overview of each run, by a unique name; ConfigError if a folder holds no run or finished iteration."""
    overviews, common = [], os.path.commonpath([folder.absolute() for folder in folders])
    for folder in folders:
        # The parts of the paths that differ; a single run has no name.
        name = os.path.relpath(folder.absolute(), common) if len(folders) > 1 else ""
        with console.status(f"reading {escape(printable(folder.name))}"), naming(str(folder)):
            run = read_run(folder)
        overview = overview_of(printable(name) or run.scheme, run)
        then = f"evenstep plan {printable(str(folder))} (compares all schemes)"
        gain = balancing(overview.summary.verdict, partial(measured_machines, run), then)
        overviews.append(replace(overview, next=gain))
    if len({each.name for each in overviews}) < len(overviews):
        raise ConfigError("a run directory was named twice: name each once")
    return overviews


def _table(overviews: Sequence[RunOverview]) -> Table:
    """Make a row per run of the page's table, with what a terminal has room for."""
    rows, table = runs_table(overviews).rows, plain_table()
    noted = dict.fromkeys(heading for row in rows for heading in row if heading.startswith("last "))
    for heading in ("run", "scheme", "training time", "samples/s", "waiting", *noted):
        table.add_column(heading, justify="left" if heading in ("run", "scheme") else "right", no_wrap=True)
    for row, each in zip(rows, overviews, strict=True):
        values = {**row, "scheme": each.run.scheme}
        table.add_row(*(escape(values.get(str(column.header), "")) for column in table.columns))
    return table


def _runs_in(folder: Path) -> list[Path]:
    """Return the folder itself, or the run directories in it, in the order in which they were written."""
    require_run_dir(folder)
    if any(folder.glob("worker-*.jsonl")):
        return [folder]
    found = sorted(folder.glob("*/worker-*.jsonl"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ConfigError(f"{folder} holds no worker-*.jsonl: give the --run-dir of a run")
    return list(dict.fromkeys(path.parent for path in found))
