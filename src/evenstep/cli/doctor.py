"""`evenstep doctor`: whether evenstep runs on these machines, how fast each worker is, and what is to be gained."""

import argparse
import json
import math
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import msgspec
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from evenstep.advice import Advice, advise, measured_machines
from evenstep.advice.hosts import HostFacts, hosts_of, warnings
from evenstep.cli import run as run_subcommand
from evenstep.cli.arguments import Parser, require_package
from evenstep.core.errors import ConfigError
from evenstep.report.recorded import RecordedRun, read_run

_DESCRIPTION: Final = """\
Look at the machines before you edit a script: versions, devices, interfaces and the secret of each host, and the speed
of each worker in a test that trains a small model for ten seconds. Ends with the scheme that is best on these speeds.

It starts workers as evenstep run does and takes the same options, those of torchrun for several nodes among them. It
takes no script. With several nodes, start it on each; the one with worker 0 prints the answer."""
_EXAMPLE: Final = "evenstep doctor --workers 4"
_OWN: Final = ("resume", "scheme", "run_dir", "start_from", "framework", "find_batch", "largest")
"""What the speed test decides by itself."""
_SCRIPT: Final = Path(__file__).parent / "doctoring" / "speed_test.py"
_MOST_SECONDS: Final = 3600.0
_STAND_IN: Final = (
    "The test trains a small stand-in for your model. For your model's gain: evenstep run --run-dir DIR, then evenstep"
    " advise DIR."
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What was found: the hosts, what to change on them, each worker's samples/s of compute, and the advice.

    `advice` is None for one worker, which waits for no other.
    """

    hosts: tuple[HostFacts, ...]
    warnings: tuple[str, ...]
    speeds: dict[int, float]
    iterations: int
    advice: Advice | None


def main(arguments: list[str]) -> int:
    """Run the subcommand."""
    if arguments[:1] in (["-h"], ["--help"]):
        make_parser().print_help()
        return 0
    require_package("doctor", "torch", "torch")
    from evenstep.launch.run_failed import RunFailedError

    own, options = parse(arguments)
    with tempfile.TemporaryDirectory(prefix="evenstep-doctor-") as folder:
        options.run_dir, into = Path(folder, "run"), Path(folder, "answer")
        into.mkdir()
        options.training_script_args = ["--seconds", str(own.seconds), "--into", str(into)]
        if own.batch_size is not None:
            options.training_script_args += ["--batch-size", str(own.batch_size)]
        try:
            run_subcommand.start(options)
        except RunFailedError as failure:
            print(f"evenstep: {failure}", file=sys.stderr)
            return failure.exit_code
        if not any(into.iterdir()):
            print("evenstep: worker 0 is on another host, which prints the answer", file=sys.stderr)
            return 0
        diagnosis = _diagnosis(into)
    if own.json:
        print(json.dumps(_values(diagnosis)))
    else:
        _show(diagnosis)
    return 0


def _own_parser() -> Parser:
    parser = Parser(prog="evenstep doctor", description=_DESCRIPTION, example=_EXAMPLE)
    parser.allow_abbrev = False
    add = parser.add_argument
    add("--seconds", type=float, default=10.0, help="how long the speed test trains, 50 iterations at least (10)")
    add("--batch-size", type=int, metavar="B", help="samples per worker on average (as many as take 20 ms)")
    add("--json", action="store_true", help="print the answer as JSON")
    return parser


def make_parser() -> Parser:
    """The options."""
    parser = _own_parser()
    parser.add_argument(
        "--workers", metavar="N", help="workers on this node (1); and all other options of evenstep run"
    )
    return parser


def parse(arguments: list[str]) -> tuple[argparse.Namespace, argparse.Namespace]:
    """The subcommand's own options, and those of `evenstep run` for the speed test."""
    own, others = _own_parser().parse_known_args(arguments)
    if not (math.isfinite(own.seconds) and 0 < own.seconds <= _MOST_SECONDS):
        raise ConfigError(f"--seconds must be a positive number, at most {_MOST_SECONDS:g}, not {own.seconds:g}")
    if own.batch_size is not None and own.batch_size < 2:
        raise ConfigError(f"--batch-size must be at least 2, not {own.batch_size}")
    options = run_subcommand.parse([*others, str(_SCRIPT)])
    if options.training_script != str(_SCRIPT):
        raise ConfigError(
            f"evenstep doctor takes no script, and {options.training_script} would be one: it trains its own model"
        )
    unset = vars(run_subcommand.parse([str(_SCRIPT)]))
    for name in _OWN:
        if getattr(options, name) != unset[name]:
            raise ConfigError(
                f"evenstep doctor has no --{name.replace('_', '-')}: it trains its own model under lb-bsp, and compares"
                " the schemes"
            )
    options.scheme = "lb-bsp"
    return own, options


def _diagnosis(into: Path) -> Diagnosis:
    told = [
        msgspec.json.decode((into / f"facts-{rank}.json").read_bytes(), type=HostFacts)
        for rank in range(len(list(into.glob("facts-*.json"))))
    ]
    hosts = tuple(hosts_of(told))
    run = read_run(into)
    return Diagnosis(
        hosts=hosts,
        warnings=tuple(warnings(hosts)),
        speeds=_speeds(run),
        iterations=run.length,
        advice=advise(measured_machines(run)) if len(run.workers) > 1 else None,
    )


def _speeds(run: RecordedRun) -> dict[int, float]:
    """Samples per second of compute of each worker, the median over its iterations."""
    return {
        worker: float(np.median(done.samples / np.maximum(done.compute_seconds, 1e-9)))
        for worker, done in run.counted.items()
    }


def _values(diagnosis: Diagnosis) -> dict[str, Any]:
    """The answer as plain values; of the secret only whether there is one."""
    hosts = [msgspec.to_builtins(host) | {"secret": host.secret is not None} for host in diagnosis.hosts]
    return {
        "hosts": hosts,
        "warnings": list(diagnosis.warnings),
        "iterations": diagnosis.iterations,
        "samples_per_second": [diagnosis.speeds[worker] for worker in sorted(diagnosis.speeds)],
        "advice": None if diagnosis.advice is None else diagnosis.advice.values,
    }


def _show(diagnosis: Diagnosis) -> None:
    console = Console(highlight=False)
    console.width = max(console.width, 80 if console.is_terminal else 200)
    for host in diagnosis.hosts:
        found = host.found
        versions = ", ".join(f"{name} {found[name]}" for name in ("evenstep", "python", "torch") if name in found)
        console.print(f"[bold]{host.name}[/bold]: {versions}", soft_wrap=True)
        backends = ", ".join(found.get("backends", ()))
        lines = {
            "processors": found.get("processors", "") if isinstance(found.get("processors"), str) else "",
            "backends": f"{backends}; cuda {found.get('cuda', 'unknown')}",
            "interfaces": ", ".join(host.interfaces),
            "secret": "EVENSTEP_SECRET is set"
            if host.secret
            else "EVENSTEP_SECRET is not set (for servers on several hosts only)",
        }
        for name, line in lines.items():
            console.print(f"  {name:<11} {line}", soft_wrap=True, markup=False)
    console.print()
    console.print(_table(diagnosis))
    for sentence in diagnosis.warnings:
        console.print(f"[bold]Warning[/bold]: {sentence}.", soft_wrap=True)
    if diagnosis.advice is None:
        console.print("One worker waits for no other: give --workers to compare several.", soft_wrap=True)
        return
    console.print(f"[bold]{diagnosis.advice.text}[/bold]", soft_wrap=True)
    for sentence in diagnosis.advice.why:
        console.print(f"  {sentence}", soft_wrap=True)
    console.print(_STAND_IN, soft_wrap=True)


def _table(diagnosis: Diagnosis) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    for name in ("worker", "host", "device"):
        table.add_column(name, no_wrap=True)
    table.add_column("samples/s", justify="right")
    table.add_column("slower than the fastest", justify="right")
    fastest = max(diagnosis.speeds.values())
    places = {
        worker: (host.name, device)
        for host in diagnosis.hosts
        for worker, device in zip(host.workers, host.devices, strict=True)
    }
    for worker, speed in sorted(diagnosis.speeds.items()):
        table.add_row(str(worker), *places[worker], f"{speed:,.0f}", f"{fastest / speed:.1f}x")
    table.caption = f"speed test: {diagnosis.iterations} iterations, compute alone"
    table.caption_justify = "left"
    return table
