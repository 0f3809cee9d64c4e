"""`evenstep top`: a run as it goes on, or once more, in a terminal."""

import heapq
import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, final

from rich.console import Console
from rich.live import Live
from rich.text import Text

from evenstep.cli.parser import Parser, as_path
from evenstep.core.errors import ConfigError
from evenstep.report.live import LiveRun
from evenstep.report.live_table import live_table
from evenstep.telemetry import Role, RunTail, Tail, event_files

_POLL_SECONDS: Final = 0.5
_POLL_EVENTS: Final = 1000
_ROLES: Final[tuple[Role, ...]] = ("worker", "server", "launcher")
_DESCRIPTION: Final = """\
Watch a run: for each worker its throughput, its speed (samples per second of pure compute), its batch, what part of its
time is waiting, input and communication, and whether it is still there; what sizes gained, which worker is slow, why,
and what it costs. All figures are of each worker's latest 50 iterations, the gain of 500. Ctrl-C ends it.

The run directory is what --run-dir of evenstep run names, or run_dir of prepare; it may still be empty."""


def run_top(arguments: list[str]) -> int:
    """Run the subcommand."""
    options = _parser().parse(arguments)
    run_dir: Path = options.run_dir
    console = Console(highlight=False)
    if not run_dir.is_dir():
        raise ConfigError(f"there is no folder {run_dir}: give the --run-dir of a run")
    if options.json or options.once or not console.is_terminal:
        return _once(run_dir, console, as_json=options.json)
    if options.replay is not None:
        _watch(_replayed(run_dir, options.replay), run_dir, console)
    else:
        _watch(_followed(run_dir), run_dir, console)
    return 0


def _parser() -> Parser:
    parser = Parser(prog="evenstep top", description=_DESCRIPTION, example="evenstep top runs/a")
    parser.add_argument("run_dir", type=as_path, metavar="RUN_DIR", help="the run directory")
    parser.add_argument(
        "--replay", type=_speed, metavar="10x", help="show a run once more from its beginning, 10 times as fast"
    )
    parser.add_argument("--once", action="store_true", help="print how the run is doing now, and end")
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    return parser


def _speed(text: str) -> float:
    speed = float(text.removesuffix("x"))
    if not 0 < speed < math.inf:
        raise ValueError(text)
    return speed


def _once(run_dir: Path, console: Console, *, as_json: bool) -> int:
    live = LiveRun()
    for role in _ROLES:
        for path in event_files(run_dir, role):
            written = path.stat().st_mtime
            for event in Tail(path).new():
                live.take(role, event, written)
    view = live.view(time.time())
    if view is None:
        raise ConfigError(f"{run_dir} holds no finished iteration yet: give the --run-dir of a run")
    if as_json:
        print(json.dumps(asdict(view)))
    else:
        console.print(live_table(view, title=str(run_dir), width=console.width, height=len(view.workers) + 20))
    return 0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Moment:
    """A run at a time; `read` are the events taken so far of a long log that is still being read, else None."""

    live: LiveRun
    now: float
    read: int | None = None


def _watch(moments: Iterator[_Moment], run_dir: Path, console: Console) -> None:
    """Show each moment until there is none any more, or Ctrl-C is pressed; the last stays on the terminal."""
    shown = None
    try:
        with Live(console=console, screen=True, auto_refresh=False) as display:
            for moment in moments:
                if moment.read is not None:
                    display.update(Text(f"{run_dir}: reading, {moment.read:,} events so far"), refresh=True)
                    continue
                view = moment.live.view(moment.now)
                if view is None:
                    display.update(Text(f"{run_dir}: waiting for the first iteration"), refresh=True)
                    continue
                shown = live_table(view, title=str(run_dir), width=console.size.width, height=console.size.height)
                display.update(shown, refresh=True)
    except KeyboardInterrupt:
        pass
    if shown is not None:
        console.print(shown)


def _followed(run_dir: Path) -> Iterator[_Moment]:
    live, tail = LiveRun(), RunTail(run_dir)
    while True:
        now = shown = time.monotonic()
        for count, (role, event) in enumerate(tail.new()):
            live.take(role, event, now)
            if count % _POLL_EVENTS == 0 and time.monotonic() - shown > _POLL_SECONDS:
                shown = time.monotonic()
                yield _Moment(live=live, now=now, read=count)
        yield _Moment(live=live, now=now)
        time.sleep(_POLL_SECONDS)


def _replayed(run_dir: Path, speed: float) -> Iterator[_Moment]:
    """The events in the order of their times, `speed` times as fast as they came.

    Raises:
        ConfigError: They have no times, or there are none.
    """
    live, began = LiveRun(), time.monotonic()
    first: float | None = None
    shown = began - _POLL_SECONDS
    now = 0.0
    for now, role, event in heapq.merge(*_timed(run_dir), key=lambda each: each[0]):
        first = now if first is None else first
        due = began + (now - first) / speed
        while (wall := time.monotonic()) < due or wall - shown >= _POLL_SECONDS:
            if wall - shown >= _POLL_SECONDS:
                shown = wall
                yield _Moment(live=live, now=now)
            else:
                time.sleep(min(due - wall, shown + _POLL_SECONDS - wall))
        live.take(role, event, now)
    yield _Moment(live=live, now=now)


def _timed(run_dir: Path) -> list[Iterator[tuple[float, Role, dict[str, Any]]]]:
    """The events of each file with the time at which each was over; one without a time comes with the one before.

    Hosts have clocks of their own, which the wall clock brings together.
    """
    begun = (event for path in event_files(run_dir, "worker") for event in Tail(path).new() if event["event"] == "run")
    servers_shift = _shift(next(begun, {}))

    def timed(role: Role, path: Path) -> Iterator[tuple[float, Role, dict[str, Any]]]:
        last: float | None = None
        shift = servers_shift
        for event in Tail(path).new():
            if event["event"] == "iteration" and "at" not in event:
                raise ConfigError(f"the events in {run_dir} have no times: they are of a version that wrote none")
            try:
                if event["event"] == "run":
                    shift = _shift(event)
                    last = 0.0 if last is None else last  # The time of a simulation begins with it.
                if "at" in event:
                    last = max(last or 0.0, event["at"] + shift + event.get("iteration_seconds", 0.0))
            except TypeError:
                continue  # A damaged event, which `evenstep report` names.
            if last is not None:
                yield last, role, event

    return [timed(role, path) for role in _ROLES for path in event_files(run_dir, role)]


def _shift(event: Mapping[str, Any]) -> float:
    """From a worker's clock to the wall clock, from the event with which it began."""
    return float(event["unix_seconds"] - event["at"]) if "unix_seconds" in event and "at" in event else 0.0
