"""Simulated runs as a table for a terminal, one row for each."""

from collections.abc import Callable, Sequence

from rich import box
from rich.table import Table

from evenstep.sim import SimulatedRun

_COLUMNS: tuple[tuple[str, Callable[[SimulatedRun], str]], ...] = (
    ("samples/s", lambda run: f"{run.samples_per_second:,.0f}"),
    ("ideal", lambda run: f"{run.over_ideal:.0%}"),
    ("waiting", lambda run: f"{run.waiting_share:.0%}"),
    ("communication", lambda run: f"{run.communication_share:.0%}"),
    ("staleness", lambda run: f"{run.mean_staleness:.1f}"),
    ("lead", lambda run: str(run.largest_lead)),
)


def simulated_table(runs: Sequence[SimulatedRun]) -> Table:
    """One row per run, with its throughput over the first one's."""
    best = max(run.samples_per_second for run in runs)
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        collapse_padding=True,
        caption="ideal: of the sum of the workers' speeds; waiting, communication: of their time;\n"
        "staleness: versions, on average; lead: iterations, the largest",
        caption_justify="left",
    )
    table.add_column("scheme", overflow="fold", min_width=12)
    for name, _ in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("speed-up", justify="right", no_wrap=True)
    for run in runs:
        speed_up = f"{run.samples_per_second / runs[0].samples_per_second:.2f}x"
        table.add_row(
            run.scheme if run.complete else f"{run.scheme} (all left after {run.seconds:,.0f} s)",
            *(value(run) for _, value in _COLUMNS),
            f"[bold]{speed_up}[/bold]" if run.samples_per_second == best else speed_up,
        )
    return table
