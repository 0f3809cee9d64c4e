"""A `LiveView` for a terminal of any size."""

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from evenstep.report.live import LiveView, LiveWorker

_AROUND = 9
"""Lines that are not workers."""
_BAR, _WIDE = 10, 96
_STYLES = {"training": "green", "simulated": "dim", "finished": "dim", "failed": "red"}
"""Of a worker's state; all else is to be noticed."""


def live_table(view: LiveView, *, title: str, width: int, height: int) -> RenderableType:
    """The view in about so many lines; of more workers than fit, those who wait least are shown, whom all wait for."""
    served = any(each.lead is not None for each in view.workers)
    room = max(3, height - _AROUND - len(view.latest))
    shown = list(view.workers)
    if len(shown) > room:
        shown = sorted(sorted(shown, key=lambda each: each.waiting_share)[:room], key=lambda each: each.worker)
    bars = width >= _WIDE
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for heading in ("worker", "state"):
        table.add_column(heading, no_wrap=True)
    for heading in ("samples/s", "speed", "batch", "waiting", *([""] * bars), "input", "communication"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("lead", "staleness") if served else ():
        table.add_column(heading, justify="right", no_wrap=True)
    for worker in shown:
        table.add_row(*_cells(worker, bars=bars))
    parts: list[RenderableType] = [_heading(view, title), table]
    if len(shown) < len(view.workers):
        parts.append(Text(f"and {len(view.workers) - len(shown)} more, who wait longer", style="dim"))
    parts.append(Text(view.verdict.text, style="bold"))
    parts += [Text(text, style="dim", overflow="ellipsis", no_wrap=True) for text in view.latest]
    return Group(*parts)


def _heading(view: LiveView, title: str) -> Text:
    epochs = view.iterations / view.iterations_per_epoch
    kind = " (simulated)" if view.simulated else " (emulated devices)" if view.emulated else ""
    heading = Text(f"{title}  ", style="bold", overflow="ellipsis", no_wrap=True)
    heading.append(f"{view.scheme}{kind}\n", style="cyan")
    heading.append(
        f"{view.throughput:,.0f} samples/s   waiting {view.waiting_share:.0%}   iteration {view.iterations:,}"
        f"   epoch {epochs:.1f}   {view.samples:,} samples",
        style="not bold",
    )
    return heading


def _cells(worker: LiveWorker, *, bars: bool) -> list[Text]:
    filled = round(_BAR * min(1.0, worker.waiting_share))
    style = _STYLES.get(worker.state, "yellow")
    cells = [
        Text(str(worker.worker)),
        Text(worker.state, style=style),
        Text(f"{worker.throughput:,.1f}"),
        Text(f"{worker.speed:,.1f}"),
        Text(str(worker.batch_size)),
        Text(f"{worker.waiting_share:.0%}"),
        *([Text("#" * filled, style="yellow").append("." * (_BAR - filled), style="dim")] if bars else []),
        Text(f"{worker.input_share:.0%}"),
        Text(f"{worker.communication_share:.0%}"),
    ]
    if worker.lead is not None:
        cells += [Text(str(worker.lead)), Text(str(worker.staleness))]
    return cells
