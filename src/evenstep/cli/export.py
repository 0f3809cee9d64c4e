"""`evenstep export`: a run's events for other tools, live or afterwards."""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from rich.console import Console

from evenstep.cli.arguments import Parser, as_path, require_run_dir
from evenstep.core.errors import ConfigError
from evenstep.telemetry import Recorder, RunTail
from evenstep.telemetry.sinks.chrome_trace import ChromeTrace
from evenstep.telemetry.sinks.opentelemetry import OpenTelemetry
from evenstep.telemetry.sinks.prometheus import Prometheus
from evenstep.telemetry.sinks.tensorboard import TensorBoard

_DESCRIPTION: Final = """\
Give a run's events to other tools: a trace for Perfetto (ui.perfetto.dev) or chrome://tracing, TensorBoard's files, or
metrics for Prometheus or OpenTelemetry. They are read from the run directory, so training does not notice. With
--follow, and with --prometheus always, later events are exported too, until Ctrl-C."""

_SINKS: Final[Mapping[str, Callable[[Any, str], Recorder]]] = MappingProxyType(
    {
        "trace": lambda path, _: ChromeTrace(path),
        "tensorboard": lambda folder, _: TensorBoard(folder),
        "opentelemetry": OpenTelemetry,
    }
)
"""For each option, makes the sink from the option's value and the run's name."""


def main(arguments: list[str]) -> int:
    """Run the subcommand."""
    options = make_parser().parse(arguments)
    run_dir: Path = options.run_dir
    require_run_dir(run_dir)
    follow = options.follow or options.prometheus is not None
    if all(getattr(options, name) is None for name in (*_SINKS, "prometheus")):
        raise ConfigError(f"export where to? give --prometheus or one of {', '.join(f'--{name}' for name in _SINKS)}")
    if not follow and next(RunTail(run_dir).new(), None) is None:
        raise ConfigError(f"{run_dir} holds no events: give the --run-dir of a run, or --follow one that is to begin")
    console = Console(stderr=True, highlight=False)
    with ExitStack() as stack:
        given = {name: getattr(options, name) for name in _SINKS}
        sinks = [_SINKS[name](to, run_dir.resolve().name) for name, to in given.items() if to is not None]
        if options.prometheus is not None:
            host, _, port = options.prometheus.rpartition(":")
            if not port.isdecimal() or int(port) > 65535:
                raise ConfigError(f"--prometheus takes a port, or HOST:PORT, not {options.prometheus!r}")
            served = Prometheus(host or "127.0.0.1", int(port))
            sinks.append(served)
            console.print(f"Metrics are at {served.url}, until Ctrl-C.", soft_wrap=True)
        for sink in sinks:
            stack.callback(sink.close)
        with console.status("exporting"):
            count = _feed(run_dir, sinks, follow=follow)
    console.print(f"{count:,} events were exported.")  # Also what is sent at the end.
    return 0


def make_parser() -> Parser:
    """Make the parser of the options."""
    parser = Parser(
        prog="evenstep export", description=_DESCRIPTION, example="evenstep export runs/a --trace trace.json"
    )
    add = parser.add_argument
    add("run_dir", type=as_path, metavar="RUN_DIR", help="the run directory")
    add("--trace", type=as_path, metavar="FILE.json", help="a trace for Perfetto or chrome://tracing")
    add("--tensorboard", type=as_path, metavar="LOG_DIR", help="files for tensorboard --logdir LOG_DIR")
    add("--opentelemetry", metavar="URL", help="metrics for an OTLP collector, such as http://localhost:4318")
    add(
        "--prometheus",
        metavar="[HOST:]PORT",
        help="serve metrics; on this host alone unless HOST is given, where everybody can then read them",
    )
    add("--follow", action="store_true", help="go on with later events")
    return parser


def _feed(run_dir: Path, sinks: list[Recorder], *, follow: bool) -> int:
    """Give all events to all sinks; return their number."""
    tail, count = RunTail(run_dir), 0
    with suppress(KeyboardInterrupt):
        while True:
            for event in tail.new():
                count += 1
                for sink in sinks:
                    sink.record(event)
            if not follow:
                break
            time.sleep(1.0)  # The tools that are fed ask less often.
    return count
