"""`evenstep top`: a run as it goes on, in a terminal."""

import json
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Final

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from evenstep.cli.arguments import Parser, as_path, require_run_dir
from evenstep.core.errors import ConfigError
from evenstep.core.shown import printable
from evenstep.report.live import LiveRun, live_table
from evenstep.telemetry import ROLES, RunTail, event_files

_DESCRIPTION: Final = """\
Watch a run: each worker's samples/s, its speed (samples per second of pure compute), its batch, how much of its time is
waiting, input and communication, and whether it is still there; what the sizes gained, which worker is slow, why, and
what that costs. All figures are of each worker's latest 50 iterations, the gain of 1,000. Ctrl-C ends it.

The run directory is what --run-dir of evenstep run names, or run_dir of prepare; it may still be empty."""


def main(arguments: list[str]) -> int:
    """Run the subcommand."""
    options = make_parser().parse(arguments)
    run_dir: Path = options.run_dir
    console = Console(highlight=False)
    require_run_dir(run_dir)
    if options.json or options.once or not console.is_terminal:
        _print_once(run_dir, console, as_json=options.json)
    else:
        _watch(run_dir, console)
    return 0


def make_parser() -> Parser:
    """Make the parser of the options."""
    parser = Parser(prog="evenstep top", description=_DESCRIPTION, example="evenstep top runs/a")
    add = parser.add_argument
    add("run_dir", type=as_path, metavar="RUN_DIR", help="the run directory")
    add("--once", action="store_true", help="print the present state of the run, and end")
    add("--json", action="store_true", help="the same as JSON")
    return parser


def _print_once(run_dir: Path, console: Console, *, as_json: bool) -> None:
    live, tail = LiveRun(), RunTail(run_dir)
    for role in ROLES:
        for path in event_files(run_dir, role):
            written = path.stat().st_mtime
            for event in tail.new_in(path):
                live.take(event, written)
    view = live.view(time.time())
    if view is None:
        raise ConfigError(f"{run_dir} holds no finished iteration yet: give the --run-dir of a run")
    if as_json:
        print(json.dumps(asdict(view)))
    else:
        console.print(
            live_table(view, title=printable(str(run_dir)), width=console.width, height=len(view.workers) + 20)
        )


def _watch(run_dir: Path, console: Console) -> None:
    """Show the run until Ctrl-C is pressed; the last view stays on the terminal."""
    live, tail, title = LiveRun(), RunTail(run_dir), printable(str(run_dir))
    shown: RenderableType = Text(f"{title}: waiting for the first iteration")
    with suppress(KeyboardInterrupt), Live(shown, console=console, screen=True, auto_refresh=False) as display:
        while True:
            now = time.monotonic()
            for event in tail.new():
                live.take(event, now)
            if (view := live.view(now)) is not None:
                shown = live_table(view, title=title, width=console.size.width, height=console.size.height)
            display.update(shown, refresh=True)
            time.sleep(0.5)  # As often as a reader can take in new figures.
    console.print(shown)
