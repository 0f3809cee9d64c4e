"""Runs and profiles as tables and bars for a terminal."""

from collections.abc import Mapping, Sequence
from io import StringIO
from typing import Final, NamedTuple

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from evenstep.report.summary import RunSummary, speed_ups

# Three different characters, so that the bars are readable without colours.
COMPUTE, WAIT, REST = "█", "░", "·"
_STYLES: Final = {COMPUTE: "blue", WAIT: "yellow", REST: "dim"}


class Bar(NamedTuple):
    """A worker's average iteration, in seconds, and its latest batch size."""

    worker: int
    batch_size: int
    compute: float
    wait: float
    whole: float


def comparison_table(runs: Sequence[RunSummary], *, further: Sequence[tuple[str, Sequence[str]]] = ()) -> Table:
    """A table with one column per run, which compares the others with the first run.

    Args:
        runs: The runs.
        further: Further rows: their names, and one text per run.
    """
    table = Table("", box=box.SIMPLE_HEAD)
    for run in runs:
        table.add_column(run.scheme, justify="right")
    # Behind a barrier all workers have the same.
    iterations = [[run] if run.served is None else run.workers for run in runs]
    averages = [" ".join(f"{each.iteration_seconds * 1000:.0f}" for each in of) + " ms" for of in iterations]
    rows = [
        ("samples/s", [f"{run.samples_per_second:,.0f}" for run in runs]),
        ("average iteration", averages),
        ("waiting per worker", [" ".join(f"{each.waiting_share:.0%}" for each in run.workers) for run in runs]),
        ("final batch sizes", [" ".join(str(each.last_batch_size) for each in run.workers) for run in runs]),
        *further,
    ]
    if len(runs) > 1:
        rows.append(("speed-up", [f"[bold]{speed_up:.2f}x[/bold]" for speed_up in speed_ups(runs)]))
    for name, values in rows:
        table.add_row(name, *values)
    return table


def iteration_bars(runs: Sequence[RunSummary]) -> Group:
    """The average iteration of each worker of these runs, on a common scale."""
    bars = {
        run.scheme: [
            Bar(each.worker, each.last_batch_size, each.compute_seconds, each.wait_seconds, each.iteration_seconds)
            for each in run.workers
        ]
        for run in runs
    }
    return drawn(bars, width=54)


def drawn(bars: Mapping[str, Sequence[Bar]], *, width: int) -> Group:
    """Draw the bars of runs by scheme; the longest has `width` characters."""
    longest = {scheme: max(each.whole for each in workers) for scheme, workers in bars.items()}
    lines: list[Text] = []
    for scheme, workers in bars.items():
        heading = Text(scheme, style="bold")
        heading.append(f"   average iteration {longest[scheme] * 1000:.0f} ms", style="not bold")
        lines += [heading, *(_line(each, max(longest.values()) / width) for each in workers)]
    legend = Text("  ")
    for character, meaning in ((COMPUTE, "compute"), (WAIT, "waiting"), (REST, "communication, input and the script")):
        legend.append(character * 2, style=_STYLES[character]).append(f" {meaning}   ")
    return Group(*lines, legend)


def lines_of(shown: RenderableType, *, colours: bool) -> list[str]:
    """Render to the lines of text of a terminal; `colours`: with colour codes."""
    file = StringIO()
    Console(file=file, width=200, force_terminal=colours, color_system="standard" if colours else None).print(shown)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def _line(bar: Bar, seconds_per_character: float) -> Text:
    """A bar whose parts are rounded at their ends, so that it is at most as long as the iteration."""
    line = Text(f"  worker {bar.worker:<3} ")
    start = 0
    for character, seconds in ((COMPUTE, bar.compute), (WAIT, bar.compute + bar.wait), (REST, bar.whole)):
        end = round(min(seconds, bar.whole) / seconds_per_character)
        line.append(character * (end - start), style=_STYLES[character])
        start = max(start, end)
    return line.append(f"  {bar.batch_size} sample" + ("" if bar.batch_size == 1 else "s"), style="dim")
