"""`evenstep demo`: what balancing gains where one worker is slow, on real data, in under a minute."""

import json
import sys
import tempfile
import time
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from evenstep.cli.demo_runs import DemoRun, train, worker_output
from evenstep.cli.demo_setup import EPOCHS, ideal_speed_up
from evenstep.cli.needs import require_scikit_learn, require_torch
from evenstep.cli.parser import Parser
from evenstep.cli.progress import progress_of
from evenstep.core.errors import ConfigError
from evenstep.report.accuracy import seconds_until
from evenstep.report.bars import iteration_bars
from evenstep.report.table import comparison_table
from evenstep.report.timeline import Panel, timeline_svg

TARGET: Final = 0.95

_DESCRIPTION = """\
Train a small convolution net on scikit-learn's handwritten digits with four workers, one of them four times slower:
first with equal batches (bsp, as plain DistributedDataParallel does), then balanced (lb-bsp); under a minute in all."""
_HONEST = (
    "Data, training and communication are real; the devices are emulated: workers 0 to 2 are held to 1.75 ms per sample"
    " and worker 3 to 7 ms."
)


def demo(arguments: list[str]) -> int:
    """Run the verb."""
    options = _parser().parse(arguments)
    require_torch("demo", extra="demo")
    require_scikit_learn("demo")
    picture: Path | None = options.picture
    if picture is not None and not picture.absolute().parent.is_dir():
        raise ConfigError(f"the picture {picture} has no folder to lie in: make {picture.parent} first")
    from evenstep.runtime.run_failed import RunFailedError

    console = Console(stderr=True, highlight=False)
    began = time.perf_counter()
    console.print(_HONEST)
    with ExitStack() as stack:
        folder: Path | None = options.run_dir
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="evenstep-demo-")))

        def watch(scheme: str, run_dir: Path) -> AbstractContextManager[None]:
            return progress_of(console, scheme, run_dir, EPOCHS)

        try:
            runs = train(folder.absolute(), watch)
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
    if picture is not None:
        picture.write_text(_picture(runs), encoding="utf-8")
        console.print(f"The picture is in {picture}.")
    if options.run_dir is not None:
        console.print(f"The events are in {options.run_dir}.")
    return 0


def _parser() -> Parser:
    parser = Parser(prog="evenstep demo", description=_DESCRIPTION, example="evenstep demo --picture timeline.svg")
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="keep the events of both runs here")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw both runs on one axis of time")
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of a table")
    return parser


def _show(runs: list[DemoRun], seconds: float) -> None:
    console = Console(highlight=False)
    reached = (seconds_until(TARGET, run.evaluations, run.recorded) for run in runs)
    further = (
        ("test accuracy", [f"{run.evaluations[-1].accuracy:.1%}" for run in runs]),
        (f"time to {TARGET:.0%} accuracy", ["not reached" if each is None else f"{each:.1f} s" for each in reached]),
    )
    console.print(comparison_table([run.summary for run in runs], further=further))
    console.print(iteration_bars([run.summary for run in runs]))
    gained = _speed_up(runs)
    ideal = ideal_speed_up()
    console.print(
        f"\nlb-bsp trained [bold]{gained:.2f} times as fast[/bold] as bsp; the ideal for these speeds is {ideal:.2f},"
        f" of which that is {gained / ideal:.0%}."
    )
    console.print(
        "Same seed, same samples in every iteration, same mathematics: only the waiting is gone."
        " Times are training times (lb-bsp's first iterations, with equal sizes to measure the workers, count too);"
        f" the demo took {seconds:.0f} s in all."
    )


def _values(runs: list[DemoRun], seconds: float) -> dict[str, Any]:
    """The results for machines."""
    return {
        "emulated_devices": True,
        "demo_seconds": seconds,
        "speed_up": _speed_up(runs),
        "ideal_speed_up": ideal_speed_up(),
        "runs": [
            {
                **asdict(run.summary),
                "test_accuracy": run.evaluations[-1].accuracy,
                "target_accuracy": TARGET,
                "seconds_to_target": seconds_until(TARGET, run.evaluations, run.recorded),
            }
            for run in runs
        ],
    }


def _speed_up(runs: list[DemoRun]) -> float:
    return runs[-1].summary.samples_per_second / runs[0].summary.samples_per_second


def _picture(runs: list[DemoRun]) -> str:
    captions = ("equal batches: everyone waits for the slowest", "each worker gets what it can do in the same time")
    return timeline_svg(
        [Panel(run=run.recorded, caption=caption) for run, caption in zip(runs, captions, strict=True)],
        title="The same six iterations, with and without waiting for the slowest worker",
        subtitle="Four workers, one of them four times slower (emulated); same seed, same samples, same mathematics."
        " Measured by evenstep demo.",
    )
