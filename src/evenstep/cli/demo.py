"""`evenstep demo`: what balancing gains where one worker is slow, on real data, in under a minute."""

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
from evenstep.cli.demonstration.runs import DemoRun, train, worker_output
from evenstep.cli.demonstration.setting import EPOCHS, folder_of, ideal_speed_up
from evenstep.cli.needs import require_scikit_learn, require_torch
from evenstep.cli.parser import Parser, as_path
from evenstep.cli.progress import progress_of
from evenstep.cli.simulate_schemes import split_schemes
from evenstep.core.errors import ConfigError
from evenstep.report.accuracy import seconds_until
from evenstep.report.bars import iteration_bars
from evenstep.report.overview import overview_of
from evenstep.report.page import page_html
from evenstep.report.table import comparison_table
from evenstep.schemes import parse_scheme

TARGET: Final = 0.95
SCHEMES: Final = ("bsp", "lb-bsp", "dssp")

_DESCRIPTION = """\
Train a small convolution net on scikit-learn's handwritten digits with four workers, one of them four times slower:
with equal batches (bsp, as plain DistributedDataParallel does), balanced (lb-bsp), and without a barrier (dssp); under
a minute in all. Ends with a table, and a page that shows all of it."""
_HONEST = (
    "Data, training and communication are real; the devices are emulated: workers 0 to 2 are held to 1.75 ms per sample"
    " and worker 3 to 7 ms."
)


def demo(arguments: list[str]) -> int:
    """Run the subcommand."""
    options = _parser().parse(arguments)
    require_torch("demo", extra="demo")
    require_scikit_learn("demo")
    _require_folder(options.report)
    from evenstep.launch.run_failed import RunFailedError

    schemes = _schemes(options.schemes)
    console = Console(stderr=True, highlight=False)
    began = time.perf_counter()
    console.print(_HONEST)
    with ExitStack() as stack:
        folder: Path | None = options.run_dir
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="evenstep-demo-")))

        folder = folder.absolute()
        watch = progress_of(console, {scheme: folder / folder_of(scheme) for scheme in schemes}, EPOCHS)
        try:
            runs = train(folder, schemes, watch)
        except RunFailedError as failure:
            if failure.worker is not None:
                print(worker_output(folder, failure.worker), end="", file=sys.stderr)
            print(f"evenstep: {failure}", file=sys.stderr)
            return failure.exit_code
    seconds = time.perf_counter() - began
    if options.json:
        print(json.dumps(_values(runs, seconds)))
    else:
        _show(runs, seconds)
    _write_report(runs, options.report, console)
    if options.run_dir is not None:
        console.print(f"The events are in {options.run_dir}.", markup=False, soft_wrap=True)
    return 0


def _parser() -> Parser:
    parser = Parser(prog="evenstep demo", description=_DESCRIPTION, example="evenstep demo --report demo.html")
    parser.add_argument("--run-dir", type=as_path, metavar="DIR", help="keep the events of both runs here")
    parser.add_argument(
        "--schemes",
        nargs="+",
        default=list(SCHEMES),
        metavar="SCHEME",
        help=f"what to compare, the first with the others ({' '.join(SCHEMES)})",
    )
    parser.add_argument(
        "--report",
        type=as_path,
        default=Path("evenstep-demo.html"),
        metavar="FILE.html",
        help="the page (evenstep-demo.html)",
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of a table")
    return parser


def _require_folder(path: Path) -> None:
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{path} has no folder to lie in: make {path.parent} first")


def _schemes(texts: list[str]) -> list[str]:
    """What to compare.

    Raises:
        ConfigError: One is not known, or stands twice.
    """
    schemes = [scheme for text in texts for scheme in split_schemes(text)]
    for scheme in schemes:
        parse_scheme(scheme)
    if len(set(schemes)) < len(schemes):
        raise ConfigError("a scheme stands twice in --schemes: name each once")
    return schemes


def _show(runs: list[DemoRun], seconds: float) -> None:
    console = Console(highlight=False)
    reached = (seconds_until(TARGET, run.evaluations, run.recorded) for run in runs)
    further = (
        ("test accuracy", [f"{run.evaluations[-1].accuracy:.1%}" for run in runs]),
        (f"time to {TARGET:.0%} accuracy", ["not reached" if each is None else f"{each:.1f} s" for each in reached]),
    )
    console.print(comparison_table([run.summary for run in runs], further=further, pushes=False))
    console.print(iteration_bars([run.summary for run in runs]))
    ideal = ideal_speed_up()
    console.print()
    for run, gained in zip(runs[1:], _speed_ups(runs)[1:], strict=True):
        console.print(
            f"{run.recorded.scheme} trained [bold]{gained:.2f} times as fast[/bold] as {runs[0].recorded.scheme}; the"
            f" ideal for these speeds is {ideal:.2f} times bsp."
        )
    console.print(
        "Same seed and samples, in the same order behind a barrier (bsp, lb-bsp): only the waiting is gone."
        " Times are training times (the first iterations, with equal sizes to measure the workers, count too);"
        f" the demo took {seconds:.0f} s in all."
    )


def _write_report(runs: list[DemoRun], path: Path, console: Console) -> None:
    """Write the page, or say what it would take."""
    try:
        page = page_html(
            [overview_of(run.recorded.scheme, run.recorded) for run in runs],
            version=__version__,
            title="evenstep demo: four workers, one of them four times slower",
        )
    except ConfigError as error:
        console.print(f"There is no page: {error}.", markup=False, soft_wrap=True)
        return
    path.write_text(page, encoding="utf-8")
    console.print(f"The report is in {path}: open it in a browser.", markup=False, soft_wrap=True)


def _values(runs: list[DemoRun], seconds: float) -> dict[str, Any]:
    """The results for machines."""
    return {
        "emulated_devices": True,
        "demo_seconds": seconds,
        "speed_up": max(_speed_ups(runs)),
        "ideal_speed_up": ideal_speed_up(),
        "runs": [
            {
                **asdict(run.summary),
                "speed_up": speed_up,
                "test_accuracy": run.evaluations[-1].accuracy,
                "target_accuracy": TARGET,
                "seconds_to_target": seconds_until(TARGET, run.evaluations, run.recorded),
            }
            for run, speed_up in zip(runs, _speed_ups(runs), strict=True)
        ],
    }


def _speed_ups(runs: list[DemoRun]) -> list[float]:
    return [run.summary.samples_per_second / runs[0].summary.samples_per_second for run in runs]
