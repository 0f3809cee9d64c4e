"""Shows the survey of a script for `evenstep plan`: hosts, what to change there, workers, the largest batch."""

from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from evenstep.cli.simulated import plain_table
from evenstep.launch.survey import Survey


def survey_values(survey: Survey) -> dict[str, Any]:
    """Return the survey as plain values."""
    workers = [
        msgspec.to_builtins(each) | {"samples_per_second": each.samples_per_second, "full_from": each.full_from}
        for each in survey.workers
    ]
    about = {"exchange_seconds": survey.exchange_seconds, "warnings": list(survey.warnings())}
    return {**msgspec.to_builtins(survey), "workers": workers, **about}


def show_survey(console: Console, survey: Survey, *, kept: Path | None) -> None:
    """Print it; `kept` is the run directory that has it for the next start."""
    for host, (first, *_) in survey.hosts.items():
        versions = ", ".join(f"{name} {version}" for name, version in first.versions.items())
        console.print(f"[bold]{host}[/bold]: {first.processors} processors, {versions}", soft_wrap=True)
    for sentence in survey.warnings():
        console.print(f"[bold]Warning[/bold]: {sentence}.", soft_wrap=True)
    console.print()
    console.print(_table(survey))
    size, unit = survey.largest_global_batch, "average samples" if survey.by_cost else "samples"
    more = any(each.more for each in survey.workers)
    fits, together = ("fits", f"{survey.together} or more") if more else ("uses every device fully", survey.together)
    use = f"global_batch_size={size})" if kept is None else f'global_batch_size="auto") with --run-dir {kept}'
    then = f" To train with it: prepare(..., {use}."
    if size == survey.length:
        fits, then = "is the whole data set, and fits", ""
    console.print(
        f"A global batch of {size} {unit} {fits}, with sizes by speed; all hold {together}.{then}",
        soft_wrap=True,
        markup=False,
    )
    if len(survey.workers) > 1:
        console.print(
            f"Besides compute, an iteration of {survey.global_batch_size} {unit} takes"
            f" {1e3 * survey.exchange_seconds:.1f} ms, in the script and to sum {survey.gradient_bytes:,} bytes of"
            " gradients.",
            soft_wrap=True,
        )
    console.print()


def _table(survey: Survey) -> Table:
    """Make a row for each worker: its device, the largest batch that it holds, and its speed with that."""
    unit = "average samples" if survey.by_cost else "samples"
    table = plain_table(f"{unit}/s: with its largest batch; 90 % from: the smallest batch with 90 % of the best speed")
    table.add_column("worker", justify="right")
    for name in ("host", "device"):
        table.add_column(name, no_wrap=True)
    for name in ("memory", f"holds, {unit}", "90 % from", f"{unit}/s"):
        table.add_column(name, justify="right")
    for each in survey.workers:
        table.add_row(
            str(each.worker),
            each.host,
            each.device,
            "" if each.memory_bytes is None else f"{each.memory_bytes / 1e9:,.1f} GB",
            f"{each.holds:,}{' or more' if each.more else ''}",
            f"{each.full_from:,}",
            f"{each.samples_per_second:,.1f}",
        )
    return table
