"""`evenstep top`: a run as it goes on, or as a replay, in a terminal."""

import argparse
import heapq
import json
import math
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.live import Live
from rich.text import Text

from evenstep.cli.arguments import Parser, as_path, require_run_dir
from evenstep.core.errors import ConfigError
from evenstep.core.shown import printable
from evenstep.report.live import LiveRun, LiveView, live_table
from evenstep.telemetry import ROLES, Event, RunTail, Tail, event_files
from evenstep.telemetry.events import IterationDone, Run

_POLL_SECONDS: Final = 0.5  # As often as a reader can take in new figures.
_DESCRIPTION: Final = """\
Watch a run: for each worker its throughput, its speed (samples per second of pure compute), its batch, what part of its
time is waiting, input and communication, and whether it is still there; what sizes gained, which worker is slow, why,
and what it costs. All figures are of each worker's latest 50 iterations, the gain of 500. Ctrl-C ends it.

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
        views = _followed(run_dir) if options.replay is None else _replayed(run_dir, options.replay)
        _watch(views, run_dir, console)
    return 0


def make_parser() -> Parser:
    """Make the parser of the options."""
    parser = Parser(prog="evenstep top", description=_DESCRIPTION, example="evenstep top runs/a")
    add = parser.add_argument
    add("run_dir", type=as_path, metavar="RUN_DIR", help="the run directory")
    add("--replay", type=_speed, metavar="10x", help="replay a run from its start, 10 times as fast")
    add("--once", action="store_true", help="print the present state of the run, and end")
    add("--json", action="store_true", help="the same as JSON")
    return parser


def _speed(text: str) -> float:
    with suppress(ValueError):
        if 0 < (speed := float(text.removesuffix("x"))) < math.inf:
            return speed
    raise argparse.ArgumentTypeError(f"needs a positive number, such as 10x, not {text!r}")


def _print_once(run_dir: Path, console: Console, *, as_json: bool) -> None:
    live = LiveRun()
    for role in ROLES:
        for path in event_files(run_dir, role):
            written = path.stat().st_mtime
            for event in Tail(path).new():
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


def _watch(views: Iterator[LiveView | None], run_dir: Path, console: Console) -> None:
    """Show each view until there are no more, or Ctrl-C is pressed; the last stays on the terminal."""
    shown, title = None, printable(str(run_dir))
    try:
        with Live(Text(f"{title}: reading"), console=console, screen=True, auto_refresh=False) as display:
            for view in views:
                if view is None:
                    display.update(Text(f"{title}: waiting for the first iteration"), refresh=True)
                    continue
                shown = live_table(view, title=title, width=console.size.width, height=console.size.height)
                display.update(shown, refresh=True)
    except KeyboardInterrupt:
        pass
    if shown is not None:
        console.print(shown)


def _followed(run_dir: Path) -> Iterator[LiveView | None]:
    live, tail = LiveRun(), RunTail(run_dir)
    while True:
        now = time.monotonic()
        for event in tail.new():
            live.take(event, now)
        yield live.view(now)
        time.sleep(_POLL_SECONDS)


def _replayed(run_dir: Path, speed: float) -> Iterator[LiveView | None]:
    """Yield the events by time, `speed` times as fast as they came."""
    live, began = LiveRun(), time.monotonic()
    first: float | None = None
    shown = began - _POLL_SECONDS
    now = 0.0
    for now, event in heapq.merge(*_timed(run_dir), key=lambda each: each[0]):
        first = now if first is None else first
        due = began + (now - first) / speed
        while (wall := time.monotonic()) < due or wall - shown >= _POLL_SECONDS:
            if wall - shown >= _POLL_SECONDS:
                shown = wall
                yield live.view(now)
            else:
                time.sleep(min(due - wall, shown + _POLL_SECONDS - wall))
        live.take(event, now)
    yield live.view(now)


def _timed(run_dir: Path) -> list[Iterator[tuple[float, Event]]]:
    """Return each file's events with the times at which they were over. An event without a time has the one before.

    The clocks of hosts differ, so times are wall-clock times.
    """
    tails = (Tail(path) for path in event_files(run_dir, "worker"))
    first = next((event for tail in tails for event in tail.new() if isinstance(event, Run)), None)
    servers_offset = 0.0 if first is None else first.wall_offset

    def timed(path: Path) -> Iterator[tuple[float, Event]]:
        last: float | None = None
        offset = servers_offset
        for event in Tail(path).new():
            if isinstance(event, Run):
                offset = event.wall_offset
                last = 0.0 if last is None else last  # A simulation's time begins here.
            taken = event.iteration_seconds if isinstance(event, IterationDone) else 0.0
            if event.at is not None:
                last = max(last or 0.0, event.at + offset + taken)
            if last is not None:
                yield last, event

    return [timed(path) for role in ROLES for path in event_files(run_dir, role)]
