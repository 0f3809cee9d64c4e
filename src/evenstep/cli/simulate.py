"""`evenstep simulate`: what each scheme would do on a cluster that you need not have, in virtual time."""

import argparse
import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
from rich.console import Console
from rich.markup import escape

from evenstep.cli.arguments import Parser, as_path
from evenstep.cli.simulated import inputs_first, output, scheme_table, split_schemes
from evenstep.cluster import Cluster
from evenstep.cluster.costs import COSTS, DISTRIBUTIONS
from evenstep.cluster.record import CAPACITY, DURATION, SHARE
from evenstep.core.errors import ConfigError, naming
from evenstep.core.samples import Costs
from evenstep.launch.launch_settings import read_cluster
from evenstep.schemes import Scheme, parse_scheme
from evenstep.sim import CostsOfSamples, Log, Scenario, SimulatedRun, simulate
from evenstep.telemetry import JsonlRecorder, Recorder, Silent
from evenstep.telemetry.regular import read_regular

DEFAULT_SCHEMES: Final = ("bsp", "lb-bsp", "dbs", "ssp", "dssp", "asp")
SPOT_SCHEMES: Final = ("bsp:engine=server", "ssp", "dssp", "asp", "asp:load=lb-bsp")
"""The default if workers come and go, which needs servers."""

_EPOCH_ITERATIONS: Final = 100  # Five epochs in a run of 500, for schemes that decide once an epoch.

_DESCRIPTION = """\
Run schemes on a cluster in virtual time: the same decisions that a real run takes, without the machines.

The cluster file says how fast each worker computes, what disturbs it and which links workers share (evenstep run
--emulate takes the same file). Without links, communication costs nothing but --exchange.

A scheme is what evenstep run --scheme takes. Separate several by spaces or by commas: a comma within a scheme
(dssp:lower=3,upper=15) differs from one between schemes by the = that follows it. A shell makes several of one:
ssp:bound={1..4}, dssp:lower={1,2},upper={8,16}."""
_EXAMPLE = "evenstep simulate examples/clusters/two-generations.toml --schemes bsp lb-bsp ssp:bound={1..4}"


def main(arguments: list[str]) -> int:
    """Run the subcommand."""
    options = make_parser().parse(inputs_first(arguments))
    told = Console(stderr=True, highlight=False)
    cluster = read_cluster(options.cluster)
    schemes = _schemes(options.schemes, cluster)
    costs = cluster.costs if options.costs is None else _costs(options.costs)
    scenarios = {name: _scenario(scheme, cluster, costs, options) for name, scheme in schemes.items()}
    folders = _folders(options.run_dir, list(schemes))
    runs: list[SimulatedRun] = []
    for (name, scenario), folder in zip(scenarios.items(), folders, strict=True):
        with told.status(f"simulating {escape(name)}"):
            runs.append(replace(_run(scenario, folder), scheme=name))
    if options.json:
        print(json.dumps(_values(runs, costs, options)))
    else:
        _show(runs, next(iter(scenarios.values())), _described(costs, options))
    if options.run_dir is not None:
        told.print(f"The events are in {options.run_dir}.", markup=False, soft_wrap=True)
    return 0


def make_parser() -> Parser:
    """Make the parser of the options."""
    parser = Parser(prog="evenstep simulate", description=_DESCRIPTION, example=_EXAMPLE)
    add = parser.add_argument
    add("cluster", type=as_path, metavar="CLUSTER.toml", help="the cluster file")
    add(
        "--schemes",
        nargs="+",
        metavar="SCHEME",
        help=f"(default: {' '.join(DEFAULT_SCHEMES)}; if workers come and go: {' '.join(SPOT_SCHEMES)})",
    )
    add("--iterations", type=int, default=500, metavar="N", help="global batches in all (500)")
    add("--batch-size", type=int, default=32, metavar="B", help="samples per worker on average (32)")
    add("--global-batch-size", type=int, metavar="X", help="of all workers, instead of --batch-size")
    add("--samples-per-epoch", type=int, metavar="N", help=f"(default: {_EPOCH_ITERATIONS} global batches)")
    add(
        "--costs",
        metavar="COSTS",
        help='samples differ in cost: "lognormal 1.0", "uniform 1 9", or a text file with a number for each sample'
        " (what the cluster file says)",
    )
    add("--by-count", action="store_true", help="do not tell the workers what samples cost, as a run without cost=")
    add("--gradients", metavar='"100 MB"', help="on the network (what the cluster file says)")
    add("--exchange", default="0 s", metavar='"2 ms"', help="what each exchange takes besides the network (0 s)")
    add("--exchange-spread", default="0 %", metavar='"10 %"', help="how much that varies with servers (0 %%)")
    add("--all-reduce", default="ring", metavar="KIND", help="ring or tree (ring)")
    add("--run-dir", type=as_path, metavar="DIR", help="write all events here, a folder for each scheme")
    add("--json", action="store_true", help="print the results as JSON instead of a table")
    return parser


def _schemes(given: list[str] | None, cluster: Cluster) -> dict[str, Scheme]:
    """Return the schemes to run, each once, by the names of their rows, in the order in which they were given.

    A row has the scheme's name, or the parameters as they were given, the default ones too.
    """
    if given is None:
        comes_and_goes = any(worker.spot is not None for worker in cluster.workers)
        given = list(SPOT_SCHEMES if comes_and_goes else DEFAULT_SCHEMES)
    texts = [scheme for text in given for scheme in split_schemes(text)]
    if not texts:
        raise ConfigError("--schemes has no scheme in it: give one or more, such as bsp lb-bsp, or leave it out")
    schemes = {scheme.name: (text, scheme) for text in texts for scheme in [parse_scheme(text)]}
    return {text if "=" in text else name: scheme for name, (text, scheme) in schemes.items()}


def _costs(text: str) -> CostsOfSamples:
    """Return the distribution of that text, or the numbers in the file of that name, between blanks or line breaks."""
    if text.partition(" ")[0] in DISTRIBUTIONS:
        return COSTS.read("--costs", text)
    try:
        content = read_regular(Path(text), most_bytes=256 << 20)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f'--costs: {text!r} cannot be read ({why}): give a file with a number for each sample, or "lognormal'
            ' SIGMA" or "uniform LEAST MOST"'
        ) from error
    try:
        numbers = [float(word) for word in content.split()]
    except ValueError:
        numbers = []
    if not numbers:
        raise ConfigError(f"--costs: the file {text} does not hold numbers between blanks, one for each sample")
    with naming(f"--costs: the file {text}"):
        Costs.of(np.array(numbers), len(numbers))
    return tuple(numbers)


def _scenario(scheme: Scheme, cluster: Cluster, costs: CostsOfSamples | None, options: argparse.Namespace) -> Scenario:
    whole = options.global_batch_size
    if whole is None:
        whole = options.batch_size * len(cluster)
    gradients = options.gradients
    return Scenario(
        cluster=cluster,
        scheme=scheme,
        global_batch_size=whole,
        iterations=options.iterations,
        epoch_samples=_EPOCH_ITERATIONS * whole if options.samples_per_epoch is None else options.samples_per_epoch,
        message_bytes=cluster.gradient_bytes if gradients is None else int(CAPACITY.read("--gradients", gradients)),
        exchange_seconds=DURATION.read("--exchange", options.exchange),
        exchange_spread=SHARE.read("--exchange-spread", options.exchange_spread),
        all_reduce=options.all_reduce,
        costs=costs,
        by_cost=not options.by_count,
    )


def _folders(run_dir: Path | None, names: list[str]) -> Sequence[Path | None]:
    """Return the folders for the events of each row; ConfigError if there are events already."""
    if run_dir is None:
        return [None] * len(names)
    folders: list[Path] = []
    for called in names:
        name = "".join(letter if letter.isalnum() else "-" for letter in called)[:200]  # File systems end at 255 bytes.
        folder, number = run_dir / name, 2
        while folder in folders:  # grouped:groups=0-1/2 and groups=0/1-2 differ only in punctuation.
            folder, number = run_dir / f"{name}-{number}", number + 1
        folders.append(folder)
        if any(folder.glob("worker-*.jsonl")):
            raise ConfigError(f"{folder} holds the events of a run already: give another --run-dir, or delete it")
    return folders


def _run(scenario: Scenario, folder: Path | None) -> SimulatedRun:
    if folder is None:
        with naming(scenario.scheme.name):
            return simulate(scenario)
    workers = [JsonlRecorder(folder, worker) for worker in range(len(scenario.cluster))]
    server: Recorder = Silent() if scenario.scheme.served is None else JsonlRecorder(folder, 0, role="server")
    with closing(Log(workers=workers, server=server)) as log, naming(scenario.scheme.name):
        return simulate(scenario, log=log)


def _described(costs: CostsOfSamples | None, options: argparse.Namespace) -> str | None:
    """Describe the costs of the samples in words."""
    if costs is None:
        return None
    return str(cast("str | None", options.costs) or costs) + (", divided by count" if options.by_count else "")


def _show(runs: list[SimulatedRun], scenario: Scenario, costs: str | None) -> None:
    console = output()
    console.print(
        f"{len(scenario.cluster)} workers, {scenario.iterations} global batches of {scenario.global_batch_size}"
        f" samples, {scenario.length} samples an epoch{'' if costs is None else f' of costs {costs}'}; simulated."
    )
    console.print(scheme_table(runs, max(runs, key=lambda run: run.samples_per_second).scheme))


def _values(runs: list[SimulatedRun], costs: CostsOfSamples | None, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "simulated": True,
        "cluster": str(options.cluster),
        "iterations": options.iterations,
        "costs": _described(costs, options),
        "runs": [{**run.summary(), "by_worker": [asdict(worker) for worker in run.workers]} for run in runs],
    }
