"""Runs side by side, as a table for a terminal."""

from collections.abc import Callable, Iterable, Sequence

from rich import box
from rich.table import Table

from evenstep.report.summary import RunSummary

_ROWS: tuple[tuple[str, Callable[[RunSummary], str]], ...] = (
    ("samples/s", lambda run: f"{run.samples_per_second:,.0f}"),
    ("average iteration", lambda run: f"{run.iteration_seconds * 1000:.0f} ms"),
    ("waiting share per worker", lambda run: _each(f"{each.waiting_share:.0%}" for each in run.workers)),
    ("final batch sizes", lambda run: _each(str(each.last_batch_size) for each in run.workers)),
)


def comparison_table(
    runs: Sequence[RunSummary], *, title: str | None = None, further: Sequence[tuple[str, Sequence[str]]] = ()
) -> Table:
    """One column per run, the first being what the others are compared with.

    Args:
        runs: The runs.
        title: Stands above the table.
        further: Further rows: what they are called, and one text per run.
    """
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    table.add_column("")
    for run in runs:
        table.add_column(run.scheme, justify="right")
    for name, value in _ROWS:
        table.add_row(name, *(value(run) for run in runs))
    for name, values in further:
        table.add_row(name, *values)
    if len(runs) > 1:
        speed_ups = (run.samples_per_second / runs[0].samples_per_second for run in runs)
        table.add_row("speed-up", *(f"[bold]{speed_up:.2f}x[/bold]" for speed_up in speed_ups))
    return table


def _each(values: Iterable[str]) -> str:
    return "  ".join(values)
