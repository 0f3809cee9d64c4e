"""`evenstep demo`: what balancing gains when one worker is slow, on real data, in under a minute."""

import json
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from evenstep import __version__
from evenstep.cli import run as run_subcommand
from evenstep.cli.arguments import Parser, as_path, require_torch, require_writable, write_text
from evenstep.cli.demonstration.setting import BATCH_SIZE, CLUSTER, EPOCHS, IDEAL_SPEED_UP, SEED, WORKERS, folder_of
from evenstep.cli.simulated import split_schemes
from evenstep.core.errors import ConfigError
from evenstep.launch.run_failed import RunFailedError
from evenstep.report.overview import RunOverview, overview_of
from evenstep.report.page import page_html
from evenstep.report.recorded import read_run
from evenstep.report.summary import speed_ups
from evenstep.report.terminal import comparison_table, iteration_bars
from evenstep.report.timeline import notes_of, seconds_until
from evenstep.schemes import parse_scheme
from evenstep.telemetry.recorder import writing_to

TARGET: Final = 0.95
SCHEMES: Final = ("bsp", "lb-bsp", "dssp")
_OUTPUT: Final = "output"

_DESCRIPTION = """\
Train a small convolution net on handwritten digits with four workers, one of them four times slower: with equal batches
(bsp, as plain DistributedDataParallel does), balanced (lb-bsp), and without a barrier (dssp); under a minute in all.
Ends with a table, and a page that shows all of it."""
_HONEST = (
    "Data, training and communication are real; the devices are emulated: workers 0 to 2 are held to 1.75 ms per sample"
    " and worker 3 to 7 ms."
)


def main(arguments: list[str]) -> int:
    """Run the subcommand."""
    options = make_parser().parse(arguments)
    require_torch("demo")
    require_writable(options.report)
    schemes = _schemes(options.schemes)
    console = Console(stderr=True, highlight=False)
    began = time.perf_counter()
    console.print(_HONEST)
    with ExitStack() as stack:
        folder: Path | None = options.run_dir
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="evenstep-demo-")))
        folder = folder.absolute()
        try:
            with console.status(f"training under {', '.join(schemes)}, one after the other"):
                runs = _train(folder, schemes)
        except RunFailedError as failure:
            if failure.worker is not None:
                logs = folder.glob(f"{_OUTPUT}/*/attempt_0/{failure.worker}/stderr.log")
                latest = max(logs, key=lambda path: path.stat().st_mtime, default=None)
                said = "" if latest is None else latest.read_text(encoding="utf-8", errors="replace")
                print(said, end="", file=sys.stderr)
            raise
    seconds = time.perf_counter() - began
    values = _values(runs, seconds)
    if options.json:
        print(json.dumps(values))
    else:
        _show(runs, values)
    title = "evenstep demo: four workers, one of them four times slower"
    write_text(options.report, page_html(runs, version=__version__, title=title))
    console.print(f"The report is in {options.report}: open it in a browser.", markup=False, soft_wrap=True)
    if options.run_dir is not None:
        console.print(f"The events are in {options.run_dir}.", markup=False, soft_wrap=True)
    return 0


def make_parser() -> Parser:
    """Make the parser of the options."""
    parser = Parser(prog="evenstep demo", description=_DESCRIPTION, example="evenstep demo --report demo.html")
    add = parser.add_argument
    add("--run-dir", type=as_path, metavar="DIR", help="keep the events of all runs here")
    add(
        "--schemes",
        nargs="+",
        default=list(SCHEMES),
        metavar="SCHEME",
        help=f"what to compare, the first with the others ({' '.join(SCHEMES)})",
    )
    page = Path("evenstep-demo.html")
    add("--report", type=as_path, default=page, metavar="FILE.html", help=f"the page ({page})")
    add("--json", action="store_true", help="print the results as JSON instead of a table")
    return parser


def _schemes(texts: list[str]) -> list[str]:
    """Return the schemes to compare; ConfigError if a scheme is not known, or stands twice."""
    schemes = [scheme for text in texts for scheme in split_schemes(text)]
    for scheme in schemes:
        parse_scheme(scheme)
    if len(set(schemes)) < len(schemes):
        raise ConfigError("a scheme stands twice in --schemes: name each once")
    return schemes


def _train(folder: Path, schemes: list[str]) -> list[RunOverview]:
    """Train under each scheme in turn, with one start of the workers; all files go to `folder`."""
    cluster = folder / "cluster.toml"
    if any((folder / folder_of(scheme)).exists() for scheme in schemes):
        raise ConfigError(f"the run directory {folder} holds a demo already: give another or empty it")
    with writing_to(folder):
        cluster.write_text(CLUSTER, encoding="utf-8")
    # The workers' output goes to files, so that it does not disturb the terminal.
    options = ["--workers", WORKERS, "--emulate", cluster, "--redirects", 3, "--log-dir", folder / _OUTPUT]
    script = [Path(__file__).parent / "demonstration/train.py", "--batch-size", BATCH_SIZE, "--epochs", EPOCHS]
    arguments = [*options, *script, "--seed", SEED, "--run-dirs", folder, "--schemes", *schemes]
    run_subcommand.start(run_subcommand.parse([str(each) for each in arguments]))
    recorded = [read_run(folder / folder_of(scheme)) for scheme in schemes]
    return [overview_of(run.scheme, run) for run in recorded]


def _show(runs: list[RunOverview], values: dict[str, Any]) -> None:
    console, results = Console(highlight=False), values["runs"]
    reached = [each["seconds_to_target"] for each in results]
    further = (
        ("test accuracy", [f"{each['test_accuracy']:.1%}" for each in results]),
        (f"time to {TARGET:.0%} accuracy", ["not reached" if each is None else f"{each:.1f} s" for each in reached]),
    )
    console.print(comparison_table([run.summary for run in runs], further=further))
    console.print(iteration_bars([run.summary for run in runs]))
    console.print()
    for run, result in zip(runs[1:], results[1:], strict=True):
        console.print(
            f"{run.name} trained [bold]{result['speed_up']:.2f} times as fast[/bold] as {runs[0].name}; the ideal for"
            f" these speeds is {IDEAL_SPEED_UP:.2f} times bsp."
        )
    console.print(
        "Same seed and samples, in the same order behind a barrier (bsp, lb-bsp): only the waiting is gone."
        " Times are training times (the first iterations, with equal sizes to measure the workers, count too);"
        f" the demo took {values['demo_seconds']:.0f} s in all."
    )


def _values(runs: list[RunOverview], seconds: float) -> dict[str, Any]:
    gained = speed_ups([run.summary for run in runs])
    return {
        "emulated_devices": True,
        "demo_seconds": seconds,
        "speed_up": max(gained),
        "ideal_speed_up": IDEAL_SPEED_UP,
        "runs": [
            {
                **asdict(run.summary),
                "speed_up": speed_up,
                "test_accuracy": notes_of(run.run, "accuracy", run.run.workers[0])[-1][1],
                "target_accuracy": TARGET,
                "seconds_to_target": seconds_until(run.run, "accuracy", TARGET),
            }
            for run, speed_up in zip(runs, gained, strict=True)
        ],
    }
