"""Runs side by side, as a table for a terminal."""

from collections.abc import Callable, Iterable, Sequence

from rich import box
from rich.table import Table

from evenstep.report.served import ServedSummary
from evenstep.report.summary import RunSummary

_ROWS: tuple[tuple[str, Callable[[RunSummary], str]], ...] = (
    ("samples/s", lambda run: f"{run.samples_per_second:,.0f}"),
    ("average iteration", lambda run: _average_iteration(run)),
    ("waiting per worker", lambda run: _each(f"{each.waiting_share:.0%}" for each in run.workers)),
    ("final batch sizes", lambda run: _each(str(each.last_batch_size) for each in run.workers)),
)
_SERVED_ROWS: tuple[tuple[str, Callable[[ServedSummary], str]], ...] = (
    ("waiting, seconds", lambda run: _each(f"{each.total_wait_seconds:.1f}" for each in run.pushes)),
    ("largest lead per worker", lambda run: _each(str(each.largest_lead) for each in run.pushes)),
    ("average staleness", lambda run: _each(f"{each.mean_staleness:.1f}" for each in run.pushes)),
    ("largest staleness", lambda run: _each(str(each.largest_staleness) for each in run.pushes)),
    ("largest behind, batches", lambda run: _each(f"{each.largest_behind:.1f}" for each in run.pushes)),
    ("commits/s", lambda run: f"{run.commits_per_second:,.0f}"),
    ("gradients pushed", lambda run: f"{run.bytes_per_second / 1e6:,.1f} MB/s"),
    ("workers came / went", lambda run: f"{run.joins} / {len(run.leaves)}"),
)
"""What is told of runs on servers."""


def comparison_table(
    runs: Sequence[RunSummary],
    *,
    title: str | None = None,
    further: Sequence[tuple[str, Sequence[str]]] = (),
    pushes: bool = True,
) -> Table:
    """One column per run, the first being what the others are compared with.

    Args:
        runs: The runs.
        title: Stands above the table.
        further: Further rows: what they are called, and one text per run.
        pushes: Whether to tell how pushes went, where there are runs on servers.
    """
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    table.add_column("")
    for run in runs:
        table.add_column(run.scheme, justify="right")
    for name, value in _ROWS:
        table.add_row(name, *(value(run) for run in runs))
    if pushes and any(run.served is not None for run in runs):
        table.add_row("iterations per worker", *(_each(str(each.iterations) for each in run.workers) for run in runs))
        for name, served in _SERVED_ROWS:
            table.add_row(name, *("" if run.served is None else served(run.served) for run in runs))
    for name, values in further:
        table.add_row(name, *values)
    if len(runs) > 1:
        speed_ups = (run.samples_per_second / runs[0].samples_per_second for run in runs)
        table.add_row("speed-up", *(f"[bold]{speed_up:.2f}x[/bold]" for speed_up in speed_ups))
    return table


def _average_iteration(run: RunSummary) -> str:
    """Behind a barrier all workers have the same; on servers each has its own."""
    if run.served is None:
        return f"{run.iteration_seconds * 1000:.0f} ms"
    return " ".join(f"{each.iteration_seconds * 1000:.0f}" for each in run.workers) + " ms"


def _each(values: Iterable[str]) -> str:
    return " ".join(values)
