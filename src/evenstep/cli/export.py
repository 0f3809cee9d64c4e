"""`evenstep export`: a run's events for other people's tools, live or afterwards."""

import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

from rich.console import Console

from evenstep.cli.parser import Parser, as_path
from evenstep.core.errors import ConfigError
from evenstep.telemetry import Recorder, RunTail
from evenstep.telemetry.sinks.chrome_trace import ChromeTrace
from evenstep.telemetry.sinks.prometheus import Prometheus
from evenstep.telemetry.sinks.tensorboard import TensorBoard

_POLL_SECONDS: Final = 1.0
_TELL_EVENTS: Final = 5000
_DESCRIPTION: Final = """\
Give a run's events to other tools: a trace for Perfetto (ui.perfetto.dev) or chrome://tracing, TensorBoard's files, or
metrics for Prometheus. They are read from the run directory, so training does not notice. With --follow, and with
--prometheus always, what comes later is taken too, until Ctrl-C."""


def run_export(arguments: list[str]) -> int:
    """Run the subcommand."""
    options = _parser().parse(arguments)
    run_dir: Path = options.run_dir
    if not run_dir.is_dir():
        raise ConfigError(f"there is no folder {run_dir}: give the --run-dir of a run")
    follow = options.follow or options.prometheus is not None
    if options.trace is None and options.tensorboard is None and options.prometheus is None:
        raise ConfigError("export where to? give --trace, --tensorboard or --prometheus")
    if not follow and next(RunTail(run_dir).new(), None) is None:
        raise ConfigError(f"{run_dir} holds no events: give the --run-dir of a run, or --follow one that is to begin")
    console = Console(stderr=True, highlight=False)
    with ExitStack() as stack:
        sinks: list[Recorder] = []
        if options.trace is not None:
            sinks.append(ChromeTrace(options.trace))
        if options.tensorboard is not None:
            sinks.append(TensorBoard(options.tensorboard))
        for sink in sinks:
            stack.callback(sink.close)
        if options.prometheus is not None:
            served = Prometheus(*_address(options.prometheus))
            stack.callback(served.close)
            sinks.append(served)
            host = _address(options.prometheus)[0]
            console.print(f"Metrics are at http://{host}:{served.port}/metrics, until Ctrl-C.", soft_wrap=True)
        with console.status("reading") as status:
            count = _feed(run_dir, sinks, follow=follow, tell=lambda count: status.update(f"{count:,} events"))
        console.print(f"{count:,} events were exported.")
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="evenstep export", description=_DESCRIPTION, example="evenstep export runs/a --trace trace.json"
    )
    parser.add_argument("run_dir", type=as_path, metavar="RUN_DIR", help="the run directory")
    parser.add_argument("--trace", type=as_path, metavar="FILE.json", help="a trace for Perfetto or chrome://tracing")
    parser.add_argument("--tensorboard", type=as_path, metavar="LOG_DIR", help="files for tensorboard --logdir LOG_DIR")
    parser.add_argument(
        "--prometheus",
        metavar="[HOST:]PORT",
        help="serve metrics; on this host alone unless HOST says otherwise, which everybody there can then read",
    )
    parser.add_argument("--follow", action="store_true", help="go on with what comes later")
    return parser


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"--prometheus takes a port, or HOST:PORT, not {text!r}")
    return host or "127.0.0.1", int(port)


def _feed(run_dir: Path, sinks: list[Recorder], *, follow: bool, tell: Callable[[int], None]) -> int:
    """Give all events to all sinks; their number, which is told now and then, too."""
    tail, count = RunTail(run_dir), 0
    with suppress(KeyboardInterrupt):
        while True:
            for _, event in tail.new():
                count += 1
                if count % _TELL_EVENTS == 0:
                    tell(count)
                # A damaged event, which `evenstep report` names, is passed over, as it is while a run is watched.
                with suppress(AttributeError, KeyError, TypeError, ValueError):
                    for sink in sinks:
                        sink.record(event)
            tell(count)
            if not follow:
                break
            time.sleep(_POLL_SECONDS)
    return count
