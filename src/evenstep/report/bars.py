"""The average iteration of each worker as a bar: how much of it was compute, how much was waiting."""

from collections.abc import Sequence

from rich.console import Group
from rich.text import Text

from evenstep.report.summary import RunSummary, WorkerSummary

# Two different characters, so that the bars read without colours too.
COMPUTE, WAIT, REST = "█", "░", "·"
_STYLES = {COMPUTE: "blue", WAIT: "yellow", REST: "dim"}


def iteration_bars(runs: Sequence[RunSummary], *, width: int = 54) -> Group:
    """The bars of all runs on one scale; the longest takes `width` characters."""
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


def _bar(worker: WorkerSummary, seconds_per_character: float) -> Text:
    """A bar whose parts are rounded at their ends, so that its length is that of the iteration."""
    compute = worker.compute_seconds
    waited = compute + worker.wait_seconds
    ends = [round(seconds / seconds_per_character) for seconds in (compute, waited, worker.iteration_seconds)]
    line = Text(f"  worker {worker.worker:<3} ")
    begin = 0
    for character, end in zip((COMPUTE, WAIT, REST), ends, strict=True):
        line.append(character * (end - begin), style=_STYLES[character])
        begin = max(begin, end)
    size = f"{worker.last_batch_size} sample" + ("" if worker.last_batch_size == 1 else "s")
    return line.append(f"  {size}", style="dim")
