"""`evenstep profile`: seconds and memory against the batch size, for a script's model on this device."""

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from os import environ
from pathlib import Path
from typing import Final, final

from rich.console import Console

from evenstep.cli.arguments import Parser, as_path, require_package, require_writable, warn_of_misplaced, write_text
from evenstep.cluster import parse_cluster
from evenstep.cluster.profile import ProfilePoint, doubt, knee, memory_of, profiled_cluster
from evenstep.cluster.slowness import DeviceMemory
from evenstep.core.ending import how_it_ended
from evenstep.core.errors import ConfigError
from evenstep.launch.launch_settings import VARIABLES, LaunchSettings
from evenstep.report.terminal import profile_table
from evenstep.telemetry import Event, Tail
from evenstep.telemetry.events import Profiled, ProfileDone

_POLL_SECONDS: Final = 0.2
_MIN_POINTS: Final = 2
_CALL: Final = """\
import importlib.util, pathlib, sys
path, function = pathlib.Path(sys.argv[1]), sys.argv[2]
sys.argv = [sys.argv[1], *sys.argv[3:]]
sys.path[0] = str(path.parent)
spec = importlib.util.spec_from_file_location(path.stem, path)
module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
getattr(module, function)()
"""
_DESCRIPTION = """\
Measure a training script's model on this device: the seconds of compute and the peak of memory at ever larger batches.

The script runs in one process, with its own loop, and ends when enough has been measured: when larger batches gain
nothing more, do not fit, or exceed --largest. With --cluster the result is a cluster file, which evenstep simulate and
evenstep run --emulate take; the devices of several machines can be put into one. train.py:main imports train.py and
calls main() instead of running the script as a program."""
_EXAMPLE = "evenstep profile --cluster this.toml --count 4 train.py --epochs 10"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What was measured: the points in rising order of size, and the memory if it grew with the batch.

    `doubt` says why the times may be wrong; None if nothing indicates that.
    """

    script: str
    points: tuple[ProfilePoint, ...]
    knee: int
    memory: DeviceMemory | None
    doubt: str | None


def main(arguments: list[str]) -> int:
    """Run the subcommand."""
    options = make_parser().parse(arguments)
    require_package("profile", "torch", "torch")
    _require(options)
    warn_of_misplaced(make_parser(), arguments, options.arguments, _script_and_function(options)[0])
    profile = _measured(options)
    # Before the file, so that what took minutes is not lost if it cannot be written.
    if options.json:
        print(json.dumps(asdict(profile)), flush=True)
    else:
        Console(highlight=False).print(profile_table(profile.points, knee=profile.knee, memory=profile.memory))
    heading = f"evenstep profile of {Path(profile.script).name} on {platform.node()}, {platform.machine()}"
    if profile.doubt is not None:
        print(f"evenstep: {profile.doubt}", file=sys.stderr)
        heading = f"{heading}; {profile.doubt}"
    if options.cluster is not None:
        text = profiled_cluster(
            options.name,
            profile.points,
            profile.memory,
            fit_from=min(profile.knee, profile.points[-_MIN_POINTS].samples),
            count=options.count,
            heading=heading,
        )
        parse_cluster(text, name="the profile")  # Refuses times that fall with the size, by noise.
        write_text(options.cluster, text)
        print(f"evenstep: wrote {options.cluster}", file=sys.stderr)
    return 0


def make_parser() -> Parser:
    """The options."""
    parser = Parser(prog="evenstep profile", description=_DESCRIPTION, example=_EXAMPLE)
    add = parser.add_argument
    add("--largest", type=int, default=4096, metavar="B", help="the largest batch to try (4096)")
    add("--cluster", type=as_path, metavar="FILE.toml", help="write the device as a cluster file")
    add("--name", default="profiled", help="of the device in the cluster file (profiled)")
    add("--count", type=int, default=1, metavar="N", help="workers in the cluster file (1)")
    add("--emulate", type=as_path, metavar="FILE.toml", help="profile the emulated device of one worker")
    add("--json", action="store_true", help="print the result as JSON instead of a table")
    add("script", help="the training script, or a function in it: train.py:main")
    add("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    return parser


def _require(options: argparse.Namespace) -> None:
    script, _ = _script_and_function(options)
    if not Path(script).is_file():
        raise ConfigError(f"there is no script {script!r}: check the path (options stand before the script)")
    if options.largest < _MIN_POINTS:
        raise ConfigError(f"--largest must be at least {_MIN_POINTS}, not {options.largest}")
    if options.cluster is not None:
        require_writable(options.cluster)
    if options.count < 1:
        raise ConfigError(f"--count must be at least 1, not {options.count}")
    if re.fullmatch(r"[A-Za-z0-9_-]+", options.name) is None:
        raise ConfigError(f"--name must be made of letters, digits, - and _, not {options.name!r}")


def _script_and_function(options: argparse.Namespace) -> tuple[str, str | None]:
    """The parts of `train.py:main`; the function is None if the script is to be run as a whole."""
    script, _, function = str(options.script).rpartition(":")
    return (script, function) if script and function.isidentifier() else (str(options.script), None)


def _measured(options: argparse.Namespace) -> Profile:
    """What the script's process has measured; ConfigError if that is too little."""
    with tempfile.TemporaryDirectory(prefix="evenstep-") as folder:
        events, exit_code = _run_script(options, Path(folder))
    points = tuple(
        ProfilePoint(samples=event.samples, seconds=event.seconds, peak_bytes=event.peak_bytes, spread=event.spread)
        for event in events
        if isinstance(event, Profiled)
    )
    if len(points) < _MIN_POINTS:
        raise ConfigError(
            f"{options.script} ended before two batch sizes were measured: it must call evenstep.prepare and train on"
            " the loader that it returns (its errors are above)"
        )
    capacity = next((event.capacity_bytes for event in events if isinstance(event, ProfileDone)), None)
    if capacity is None:
        how = how_it_ended(exit_code) + " (its errors are above)" if exit_code else "was over"
        print(
            f"evenstep: {options.script} {how} before larger batches were measured: have it train for longer, or take"
            " what follows for a part",
            file=sys.stderr,
        )
    return Profile(
        script=options.script,
        points=points,
        knee=knee(points),
        memory=None if capacity is None else memory_of(points, capacity),
        doubt=doubt(points),
    )


def _run_script(options: argparse.Namespace, folder: Path) -> tuple[list[Event], int]:
    """The events of the script's process, of whose output only errors are shown, and its exit code."""
    settings = LaunchSettings(
        profile=options.largest,
        run_dir=str(folder),
        emulate=None if options.emulate is None else str(options.emulate.absolute()),
    )
    script, function = _script_and_function(options)
    called = [script] if function is None else ["-c", _CALL, script, function]
    command = [sys.executable, *called, *options.arguments]
    # As many threads as a worker under evenstep run has, of which there may be several on this machine.
    others = {name: value for name, value in environ.items() if name not in VARIABLES.values()}
    environment = {"OMP_NUM_THREADS": "1", **others, **settings.to_environment()}
    events: list[Event] = []
    tail = Tail(folder / "worker-0.jsonl")
    with (
        Console(stderr=True, highlight=False).status(f"profiling {options.script}") as status,
        subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process,
    ):
        try:
            while process.returncode is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_SECONDS)
                events += tail.new()
                done = [event.samples for event in events if isinstance(event, Profiled)]
                if done:
                    status.update(f"profiling {options.script}: batches of {done[-1]} samples are measured")
        finally:
            process.kill()
    return events, process.returncode
