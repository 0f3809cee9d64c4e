"""`evenstep run`: torchrun, with a few more options."""

import argparse
import gc
import json
import os
import re
import sys
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from msgspec import structs

from evenstep.cli.arguments import Parser, as_path, require_torch
from evenstep.core.errors import ConfigError
from evenstep.launch.launch_settings import HEARTBEAT_SECONDS, SUMMARY_FILE, VARIABLES, LaunchSettings

_DESCRIPTION = """\
Start a training script on several workers, as torchrun does, under any scheme.

The script needs the one line evenstep.prepare. All arguments of torchrun keep their names and meaning (torchrun --help
lists them) and stand before the script, as the options below do; what follows the script is the script's own.

The exit code is 0 if the run finished, on parameter servers also if workers were lost, which are named. If it failed,
the first worker that failed gives the code, 128 + N for signal N. A wrong argument gives 2."""
_FRAMEWORKS = ("jax", "mxnet", "tensorflow")
_EXAMPLE = "evenstep run --workers 4 --scheme lb-bsp --slow 3=4x train.py --epochs 10"


def main(arguments: list[str]) -> int:
    """Run the subcommand."""
    if arguments[:1] in (["-h"], ["--help"]):
        make_parser().print_help()
        return 0
    require_torch("run")
    gc.disable()  # Almost all objects of PyTorch stay, and every collection during its import would look at them.
    try:
        import evenstep.launch.launch  # noqa: F401 - the others need it too
    finally:
        gc.enable()
    options = parse(arguments)
    without_prepare = _without_prepare(options)
    with ExitStack() as stack:
        run_dir = options.run_dir or LaunchSettings.from_environment(os.environ).run_dir
        if options.json and run_dir is None:
            run_dir = options.run_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="evenstep-"))
        marks = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="evenstep-")))
        notices = start(options, marks=marks)
        summary = marks / SUMMARY_FILE
        lines = summary.read_text(encoding="utf-8").splitlines() if summary.exists() else []
        if options.elastic and run_dir is not None:  # No replica has seen all of it.
            from evenstep.report.summary import summarise

            with suppress(ConfigError):  # No step counted.
                if (run := summarise(Path(run_dir))).elastic is not None:
                    lines += [f"{run.scheme}: {run.iterations:,} steps; {run.elastic.text}", run.verdict.text]
        prepared = any(marks.iterdir())
        for notice in [*lines, *notices, *([] if prepared else [without_prepare])]:
            print(f"evenstep: {notice}", file=sys.stderr)
        if options.json:
            from evenstep.report.summary import summarise

            print(json.dumps(asdict(summarise(Path(str(run_dir)))) if prepared else None))
    return 0


def _without_prepare(options: argparse.Namespace) -> str:
    """Return the sentence for a run in which no worker called `prepare`."""
    asked = {name: getattr(options, name) for name in (*VARIABLES, "resume")}
    asked |= {"run_dir": options.run_dir and not options.resume, "heartbeat": options.heartbeat != HEARTBEAT_SECONDS}
    given = [f"--{name.replace('_', '-')}" for name, value in asked.items() if value]
    without = f"{options.training_script} never called evenstep.prepare, so it ran without evenstep"
    *others, last = given or [""]
    return f"{without}; {', '.join(others)}{' and ' if others else ''}{last} had no effect" if given else without


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the options of `evenstep run`, including torchrun's."""
    from torch.distributed.run import get_args_parser

    parser = _FullParser(prog="evenstep run", description="", example=_EXAMPLE, parents=(get_args_parser(),))
    if parser.get_default("master_port") == 29500:
        parser.set_defaults(master_port=None)  # PyTorch 2.11 names one, where two runs on a host need two.
    _add_options(parser)
    options = parser.parse(arguments)
    if options.resume is not None:
        if options.run_dir is not None:
            raise ConfigError("--resume names the run directory already: leave out --run-dir")
        options.run_dir = options.resume
    _read_elastic(options)
    return options


def _read_elastic(options: argparse.Namespace) -> None:
    """Make numbers of `--elastic`, and MAX workers if their number is not given."""
    if options.elastic is None:
        for name in ("lighthouse", "nproc_per_replica"):
            if getattr(options, name) is not None:
                option = "--" + name.replace("_", "-")
                raise ConfigError(f"{option} is for elastic runs: give --elastic MIN:MAX too, or leave it out")
        return
    given: str = options.elastic
    least, colon, most = given.partition(":")
    if not (colon and least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most)):
        raise ConfigError(f"--elastic must be the fewest and the most replicas, such as 1:4, not {given!r}")
    options.elastic = int(least), int(most)
    if options.nproc_per_replica is not None and options.nproc_per_replica < 1:
        raise ConfigError(f"--nproc-per-replica must be at least 1 process, not {options.nproc_per_replica}")
    if options.lighthouse is not None and not re.fullmatch(r"http://[^/]+:\d{1,5}", options.lighthouse):
        raise ConfigError(f"--lighthouse must be an address, such as http://host0:29510, not {options.lighthouse!r}")
    if options.lighthouse is None and options.nproc_per_node == "1":
        options.nproc_per_node = most


def start(options: argparse.Namespace, *, marks: Path | None = None, survey_up_to: int | None = None) -> list[str]:
    """Start the workers and wait for them; return and raise what `evenstep.launch.launch.launch` does.

    In the folder `marks` each worker that calls `prepare` leaves a file, and the first worker the summary of the run.
    With `survey_up_to`, the run is a survey, which tries batches of up to that many samples and is left there too.
    """
    from evenstep.launch.launch import launch

    given = {name: getattr(options, name) for name in VARIABLES} | {"slow": tuple(options.slow)}
    settings = structs.replace(
        LaunchSettings.from_environment(os.environ).with_given(given),
        servers=(),
        survey_up_to=survey_up_to,
        resume=options.resume is not None,
        heartbeat_seconds=options.heartbeat,
        marks=None if marks is None else str(marks),
        elastic=options.elastic,
        nproc_per_replica=options.nproc_per_replica or 1,
        lighthouse=options.lighthouse,
    )
    if survey_up_to is not None:
        settings = structs.replace(settings, scheme=None, batch_sizes=None)
    return launch(options, settings, framework=options.framework)


class _FullParser(Parser):
    """Understands torchrun's arguments too; its help leaves them to torchrun's."""

    def error(self, message: str) -> NoReturn:
        if "training_script" in message:
            raise ConfigError("evenstep run needs a training script to start: see evenstep run --help")
        super().error(message)

    def format_help(self) -> str:
        return make_parser().format_help()


def make_parser() -> Parser:
    """Make the parser of evenstep's own options, without torchrun's."""
    parser = Parser(prog="evenstep run", description=_DESCRIPTION, example=_EXAMPLE)
    _add_options(parser)
    parser.add_argument("script", help="the training script (or a module with torchrun's -m)")
    parser.add_argument("arguments", nargs="*", help="the script's own arguments")
    return parser


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--workers",
        metavar="N",
        dest="nproc_per_node",
        default=argparse.SUPPRESS,
        help="workers on this node: another name for torchrun's --nproc-per-node (default: 1)",
    )
    add(
        "--scheme",
        metavar="SCHEME",
        help="bsp, lb-bsp, dbs, local-sgd, diloco, asp, ssp, dssp or grouped, with parameters such as lb-bsp:multiple=8"
        "; or a recipe of your own, such as my_module:my_recipe (default: what the script says, else lb-bsp)",
    )
    add(
        "--batch-sizes",
        metavar="SIZES",
        help="fixed sizes instead of a scheme: by rank, such as 12,9,3, or such as"
        " 'rank:0=12,host:node7=4,gpu:NVIDIA GeForce RTX 3090=24', where rank wins over host and host over gpu",
    )
    add(
        "--slow",
        metavar="RANK=4x",
        action="append",
        default=[],
        help="make a worker slower: 3=4x, 3=+50ms or 3=4x+50ms; repeatable",
    )
    add("--emulate", type=as_path, metavar="FILE.toml", help="emulate the devices and disturbances of a cluster file")
    add("--run-dir", type=as_path, metavar="DIR", help="where the workers write their events, as JSON lines")
    add(
        "--framework",
        choices=_FRAMEWORKS,
        help="let workers of another framework than PyTorch meet, on one host: sets TF_CONFIG for tensorflow and"
        " JAX_COORDINATOR_ADDRESS for jax, and starts the scheduler and server of mxnet's kvstore",
    )
    add(
        "--timeout",
        metavar="SECONDS",
        help="how long a worker waits for another (default: what the script says, else 300)",
    )
    add(
        "--resume",
        type=as_path,
        metavar="RUN_DIR",
        help="continue the run in this directory from its servers' last snapshot (asp, ssp, dssp, grouped)",
    )
    add(
        "--heartbeat",
        metavar="SECONDS",
        type=float,
        default=HEARTBEAT_SECONDS,
        help="how long a worker or a parameter server may be silent before it is given up (default: %(default)g)",
    )
    add(
        "--elastic",
        metavar="MIN:MAX",
        help="let up to MAX replicas come and go without a restart of the others, under torchft's quorum of at least"
        " MIN; one that dies is started again (docs/elastic.md)",
    )
    add(
        "--nproc-per-replica",
        metavar="K",
        type=int,
        help="the processes of each replica of an elastic run, over which its model is split (default: 1); one of them"
        " that dies is started again with all others of its replica",
    )
    add(
        "--lighthouse",
        metavar="ADDRESS",
        help="the address of torchft's Lighthouse, for an elastic run on several hosts, such as http://host0:29510: the"
        " launcher on that host starts it, unless it runs already (default: one for this host alone)",
    )
    add("--json", action="store_true", help="print a summary of the run as the last line, as JSON")
