"""Runs and profiles as tables and bars for a terminal."""

from collections.abc import Callable, Iterable, Sequence
from io import StringIO
from typing import Final

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from evenstep.cluster.profile import ProfilePoint
from evenstep.cluster.slowness import DeviceMemory
from evenstep.report.summary import RunSummary, ServedSummary, WorkerSummary

# Three different characters, so that the bars read without colours too.
COMPUTE, WAIT, REST = "█", "░", "·"
_STYLES: Final = {COMPUTE: "blue", WAIT: "yellow", REST: "dim"}
_PROFILE_BAR: Final = 30

_ROWS: Final[Sequence[tuple[str, Callable[[RunSummary], str]]]] = (
    ("samples/s", lambda run: f"{run.samples_per_second:,.0f}"),
    ("average iteration", lambda run: _average_iteration(run)),
    ("waiting per worker", lambda run: _each(f"{each.waiting_share:.0%}" for each in run.workers)),
    ("final batch sizes", lambda run: _each(str(each.last_batch_size) for each in run.workers)),
)
_SERVED_ROWS: Final[Sequence[tuple[str, Callable[[ServedSummary], str]]]] = (
    ("waiting, seconds", lambda run: _each(f"{each.total_wait_seconds:.1f}" for each in run.pushes)),
    ("largest lead per worker", lambda run: _each(str(each.largest_lead) for each in run.pushes)),
    ("average staleness", lambda run: _each(f"{each.mean_staleness:.1f}" for each in run.pushes)),
    ("largest staleness", lambda run: _each(str(each.largest_staleness) for each in run.pushes)),
    ("largest behind, batches", lambda run: _each(f"{each.largest_behind:.1f}" for each in run.pushes)),
    ("commits/s", lambda run: f"{run.commits_per_second:,.0f}"),
    ("gradients pushed", lambda run: f"{run.bytes_per_second / 1e6:,.1f} MB/s"),
    ("workers came / went", lambda run: f"{run.joins} / {len(run.leaves)}"),
)


def comparison_table(
    runs: Sequence[RunSummary],
    *,
    title: str | None = None,
    further: Sequence[tuple[str, Sequence[str]]] = (),
    pushes: bool = True,
) -> Table:
    """One column per run; the first run is the one that the others are compared with.

    Args:
        runs: The runs.
        title: Above the table.
        further: Further rows: their names, and one text per run.
        pushes: Whether to describe the pushes of runs on servers.
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
    return _each(f"{each.iteration_seconds * 1000:.0f}" for each in run.workers) + " ms"


def _each(values: Iterable[str]) -> str:
    return " ".join(values)


def iteration_bars(runs: Sequence[RunSummary], *, width: int = 54) -> Group:
    """The average iteration of each worker as a bar, all on one scale; the longest has `width` characters."""
    longest = max(run.iteration_seconds for run in runs)
    lines: list[Text] = []
    for run in runs:
        heading = Text(f"{run.scheme}", style="bold")
        heading.append(f"   average iteration {run.iteration_seconds * 1000:.0f} ms", style="not bold")
        lines.append(heading)
        lines += [_bar(worker, longest / width) for worker in run.workers]
    legend = Text("  ")
    for character, meaning in ((COMPUTE, "compute"), (WAIT, "waiting"), (REST, "communication, input and the script")):
        legend.append(character * 2, style=_STYLES[character]).append(f" {meaning}   ")
    return Group(*lines, legend)


def lines_of(shown: RenderableType, *, colours: bool) -> list[str]:
    """What a terminal shows, as lines of text; `colours`: with its codes for them."""
    file = StringIO()
    Console(file=file, width=200, force_terminal=colours, color_system="standard" if colours else None).print(shown)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def _bar(worker: WorkerSummary, seconds_per_character: float) -> Text:
    """A bar whose parts are rounded at their ends, so that its length is that of the iteration at most."""
    waited = worker.compute_seconds + worker.wait_seconds
    ends = (worker.compute_seconds, waited, worker.iteration_seconds)
    line = Text(f"  worker {worker.worker:<3} ")
    start = 0
    for character, seconds in zip((COMPUTE, WAIT, REST), ends, strict=True):
        end = round(min(seconds, worker.iteration_seconds) / seconds_per_character)
        line.append(character * (end - start), style=_STYLES[character])
        start = max(start, end)
    size = f"{worker.last_batch_size} sample" + ("" if worker.last_batch_size == 1 else "s")
    return line.append(f"  {size}", style="dim")


def profile_table(points: Sequence[ProfilePoint], *, knee: int, memory: DeviceMemory | None) -> Table:
    """One row for each size, its throughput as a bar; the knee and the memory limit below."""
    best = max(point.samples_per_second for point in points)
    limit = "memory did not grow with the batch"
    if memory is not None:
        limit = (
            f"memory: {memory.bytes_per_sample / 1e6:,.2f} MB a sample and {memory.fixed_bytes / 1e6:,.0f} MB beside;"
            f" about {memory.largest_batch:,} samples fit in the {memory.capacity_bytes / 1e9:,.1f} GB there are"
        )
    caption = f"knee: from {knee} samples on, at least 90 % of the best throughput\n{limit}"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=caption, caption_justify="left")
    for name in ("batch", "time", "samples/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("peak memory", justify="right", no_wrap=True)
    for point in points:
        table.add_row(
            f"{point.samples}" + (" <" if point.samples == knee else "  "),
            f"{point.seconds * 1e3:,.2f} ms",
            f"{point.samples_per_second:,.0f}",
            "█" * round(_PROFILE_BAR * point.samples_per_second / best),
            f"{point.peak_bytes / 1e6:,.0f} MB",
        )
    return table
