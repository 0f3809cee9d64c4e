"""The common part of `evenstep simulate` and `evenstep plan`: simulated schemes are asked for and shown."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table

from evenstep.sim import SimulatedRun

_COLUMNS: Final[tuple[tuple[str, Callable[[SimulatedRun], str]], ...]] = (
    ("samples/s", lambda run: f"{run.samples_per_second:,.0f}"),
    ("ideal", lambda run: f"{run.over_ideal:.0%}"),
    ("waiting", lambda run: f"{run.waiting_share:.0%}"),
    ("communication", lambda run: f"{run.communication_share:.0%}"),
    ("staleness", lambda run: f"{run.mean_staleness:.1f}"),
    ("lead", lambda run: str(run.largest_lead)),
)


def split_schemes(text: str) -> list[str]:
    """Return the schemes in a text with commas between them and within them.

    Text after a comma belongs to the scheme before it if it is a parameter, which has an equals sign.

    >>> split_schemes("bsp,dssp:lower=3,upper=15,asp:load=lb-bsp:predictor=ema;minimum=4")
    ['bsp', 'dssp:lower=3,upper=15', 'asp:load=lb-bsp:predictor=ema;minimum=4']
    """
    schemes: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if schemes and "=" in part.partition(":")[0]:
            schemes[-1] += f",{part}"
        else:
            schemes.append(part)
    return schemes


def inputs_first(arguments: list[str]) -> list[str]:
    """Move files and folders from the end of the list of --schemes, as argparse would see it, to the front."""
    if "--schemes" not in arguments:
        return arguments
    begin = arguments.index("--schemes") + 1
    end = next((at for at in range(begin, len(arguments)) if arguments[at].startswith("--")), len(arguments))
    last = arguments[end - 1]
    if end - begin < 2 or not (last.endswith(".toml") or Path(last).is_dir()):
        return arguments
    return [last, *arguments[: end - 1], *arguments[end:]]


def output() -> Console:
    """Make the console of stdout. A narrow terminal wraps lines rather than drop names; other outputs fit any line."""
    console = Console(highlight=False)
    console.width = max(console.width, 80 if console.is_terminal else 200)
    return console


def plain_table(caption: str | None = None) -> Table:
    """Make a table without a frame."""
    return Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        collapse_padding=True,
        caption=caption,
        caption_justify="left",
    )


def scheme_table(runs: Sequence[SimulatedRun], chosen: str) -> Table:
    """Make one row per scheme, with its throughput relative to the first; the row of the chosen one is bold."""
    table = plain_table(
        "ideal: of the sum of the workers' speeds; waiting, communication: of their time;\n"
        "staleness: versions, on average; lead: iterations, the largest"
    )
    table.add_column("scheme", overflow="fold", min_width=12)
    for name in (*(name for name, _ in _COLUMNS), "speed-up"):
        table.add_column(name, justify="right", no_wrap=True)
    for run in runs:
        table.add_row(
            run.scheme if run.complete else f"{run.scheme} (all left after {run.seconds:,.0f} s)",
            *(value(run) for _, value in _COLUMNS),
            f"{run.samples_per_second / runs[0].samples_per_second:.2f}x",
            style="bold" if run.scheme == chosen else "",
        )
    return table
