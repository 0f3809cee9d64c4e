"""`evenstep run`: torchrun, and a few options more."""

import argparse
import json
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from evenstep.cli.needs import require_torch
from evenstep.cli.parser import Parser, as_path, warn_of_misplaced
from evenstep.core.errors import ConfigError
from evenstep.report.recorded import read_run
from evenstep.report.summary import summarise
from evenstep.report.verdict import verdict_of
from evenstep.runtime.launch_settings import LaunchSettings

_DESCRIPTION = """\
Start a training script on several workers, as torchrun does, under any scheme.

The script needs the one line evenstep.prepare. All arguments of torchrun keep their names and meaning (torchrun --help
lists them) and stand before the script, as the options below do; what follows the script is the script's own."""
_EXAMPLE = "evenstep run --workers 4 --scheme lb-bsp --slow 3=4x train.py --epochs 10"


def run(arguments: list[str]) -> int:
    """Run the verb."""
    if arguments[:1] in (["-h"], ["--help"]):
        _short_parser().print_help()
        return 0
    require_torch("run")
    from evenstep.runtime.run_failed import RunFailedError

    options = parse(arguments)
    warn_of_misplaced(_own_parser(), arguments, options.training_script_args, options.training_script)
    with ExitStack() as stack:
        if options.json and options.run_dir is None:
            options.run_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="evenstep-"))
        try:
            notices = start(options)
        except RunFailedError as failure:
            print(f"evenstep: {failure}", file=sys.stderr)
            return failure.exit_code
        for notice in notices:
            print(f"evenstep: {notice}", file=sys.stderr)
        if options.run_dir is not None:
            _tell_verdict(Path(options.run_dir))
        if options.json:
            print(json.dumps(asdict(summarise(Path(options.run_dir)))))
    return 0


def _tell_verdict(run_dir: Path) -> None:
    """One line on how the run went; nothing where it has left no iteration (several nodes, or a script without one)."""
    try:
        verdict = verdict_of(read_run(run_dir))
    except ConfigError:
        return
    print(f"evenstep: {verdict.text}", file=sys.stderr)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options of `evenstep run`, torchrun's among them.

    Raises:
        ConfigError: One is unknown or malformed.
    """
    from torch.distributed.run import get_args_parser

    parser = _FullParser(prog="evenstep run", description="", example=_EXAMPLE, parents=(get_args_parser(),))
    _add_options(parser)
    options = parser.parse(arguments)
    if options.resume is not None:
        if options.run_dir is not None:
            raise ConfigError("--resume names the run directory already: leave out --run-dir")
        options.run_dir = options.resume
    return options


def start(options: argparse.Namespace) -> list[str]:
    """Start the workers and wait for them; returns and raises what `evenstep.runtime.launch.launch` does."""
    from evenstep.runtime.launch import launch

    settings = LaunchSettings(
        scheme=options.scheme,
        slow=tuple(options.slow),
        emulate=None if options.emulate is None else str(Path(options.emulate).absolute()),
        run_dir=None if options.run_dir is None else str(Path(options.run_dir).absolute()),
        resume=options.resume is not None,
    )
    return launch(options, settings)


class _FullParser(Parser):
    """Understands torchrun's arguments too, but its help leaves them to torchrun's."""

    def error(self, message: str) -> NoReturn:
        if "training_script" in message:
            raise ConfigError("evenstep run needs a training script to start: see evenstep run --help")
        super().error(message)

    def format_help(self) -> str:
        return _short_parser().format_help()


def _own_parser() -> Parser:
    parser = Parser(prog="evenstep run", description=_DESCRIPTION, example=_EXAMPLE)
    _add_options(parser)
    return parser


def _short_parser() -> Parser:
    parser = _own_parser()
    parser.add_argument("script", help="the training script (or a module with torchrun's -m)")
    parser.add_argument("arguments", nargs="*", help="the script's own arguments")
    return parser


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers",
        metavar="N",
        dest="nproc_per_node",
        default=argparse.SUPPRESS,
        help="workers on this node: another name for torchrun's --nproc-per-node (default: 1)",
    )
    parser.add_argument(
        "--scheme",
        metavar="SCHEME",
        help="such as bsp, lb-bsp or lb-bsp:predictor=ema (default: what the script says, else lb-bsp)",
    )
    parser.add_argument(
        "--slow",
        metavar="RANK=4x",
        action="append",
        default=[],
        help="make a worker slower: 3=4x, 3=+50ms or 3=4x+50ms; repeatable",
    )
    parser.add_argument(
        "--emulate", type=as_path, metavar="FILE.toml", help="emulate the devices and disturbances of a cluster file"
    )
    parser.add_argument(
        "--run-dir", type=as_path, metavar="DIR", help="where the workers write their events, as JSON lines"
    )
    parser.add_argument(
        "--resume",
        type=as_path,
        metavar="RUN_DIR",
        help="continue the run in this directory from its servers' last snapshot (asp, ssp, dssp, grouped)",
    )
    parser.add_argument("--json", action="store_true", help="print a summary of the run as the last line, as JSON")
