"""`evenstep simulate`: what each scheme would do on a cluster that you need not have, in virtual time."""

import argparse
import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final, cast

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from evenstep.cli.arguments import Parser, as_path
from evenstep.cli.costs_file import read_costs
from evenstep.cli.simulate_schemes import split_schemes, swept
from evenstep.cluster import Cluster
from evenstep.cluster.record import CAPACITY, DURATION, SHARE, Quantity
from evenstep.core.errors import ConfigError, naming
from evenstep.launch.launch_settings import read_cluster
from evenstep.schemes import Scheme, parse_scheme
from evenstep.sim import CostsOfSamples, Log, Scenario, SimulatedRun, simulate
from evenstep.telemetry import JsonlRecorder, Recorder, Silent

DEFAULT_SCHEMES: Final = ("bsp", "lb-bsp", "dbs", "ssp", "dssp", "asp")
SPOT_SCHEMES: Final = ("bsp:engine=server", "ssp", "dssp", "asp", "asp:load=lb-bsp")
"""The default if workers come and go, which needs servers."""

_EPOCH_ITERATIONS: Final = 100
_MAX_NAME: Final = 200
"""Letters of a folder's name; file systems end at 255 bytes."""

_COLUMNS: Final[tuple[tuple[str, Callable[[SimulatedRun], str]], ...]] = (
    ("samples/s", lambda run: f"{run.samples_per_second:,.0f}"),
    ("ideal", lambda run: f"{run.over_ideal:.0%}"),
    ("waiting", lambda run: f"{run.waiting_share:.0%}"),
    ("communication", lambda run: f"{run.communication_share:.0%}"),
    ("staleness", lambda run: f"{run.mean_staleness:.1f}"),
    ("lead", lambda run: str(run.largest_lead)),
)
_DESCRIPTION = """\
Run schemes on a cluster in virtual time: the same decisions that a real run takes, without the machines.

The cluster file says how fast each worker computes, what disturbs it and which links workers share (evenstep run
--emulate takes the same file). Without links, communication costs nothing but --exchange.

A scheme is what evenstep run --scheme takes. Separate several by spaces or by commas: a comma within a scheme
(dssp:lower=3,upper=15) differs from one between schemes by the = that follows it."""
_EXAMPLE = "evenstep simulate examples/clusters/two-generations.toml --schemes bsp lb-bsp ssp --sweep bound=1:4"


def main(arguments: list[str]) -> int:
    """Run the subcommand."""
    options = make_parser().parse(_cluster_first(arguments))
    cluster = read_cluster(options.cluster)
    schemes = _schemes(options.schemes, options.sweep, cluster)
    costs = cluster.costs if options.costs is None else read_costs(options.costs)
    scenarios = {name: _scenario(scheme, cluster, costs, options) for name, scheme in schemes.items()}
    folders = _folders(options.run_dir, list(schemes))
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    runs: list[SimulatedRun] = []
    with Progress(*columns, console=console, refresh_per_second=4, transient=True) as shown:
        for (name, scenario), folder in zip(scenarios.items(), folders, strict=True):
            task = shown.add_task(name, total=1.0)
            run = _run(scenario, folder, lambda part, task=task: shown.update(task, completed=part))
            runs.append(replace(run, scheme=name))
            shown.update(task, completed=1.0)
    if options.json:
        print(json.dumps(_values(runs, costs, options)))
    else:
        _show(runs, next(iter(scenarios.values())), _described(costs, options))
    if options.run_dir is not None:
        console.print(f"The events are in {options.run_dir}.", markup=False, soft_wrap=True)
    return 0


def _cluster_first(arguments: list[str]) -> list[str]:
    """Move a cluster file at the end of the list of --schemes, which argparse would take for a scheme, to the front."""
    if "--schemes" not in arguments:
        return arguments
    begin = arguments.index("--schemes") + 1
    end = next((at for at in range(begin, len(arguments)) if arguments[at].startswith("--")), len(arguments))
    if end - begin < 2 or not arguments[end - 1].endswith(".toml"):
        return arguments
    return [arguments[end - 1], *arguments[: end - 1], *arguments[end:]]


def make_parser() -> Parser:
    """The options."""
    parser = Parser(prog="evenstep simulate", description=_DESCRIPTION, example=_EXAMPLE)
    add = parser.add_argument
    add("cluster", type=as_path, metavar="CLUSTER.toml", help="the cluster file")
    add(
        "--schemes",
        nargs="+",
        metavar="SCHEME",
        help=f"(default: {' '.join(DEFAULT_SCHEMES)}; if workers come and go: {' '.join(SPOT_SCHEMES)})",
    )
    add(
        "--sweep",
        action="append",
        default=[],
        metavar="NAME=FROM:TO",
        help="run the schemes that have this parameter once with each whole number, as in bound=1:16, lower=2:8:2 (in"
        " steps) or predictor=ema/narx (one after another); repeatable",
    )
    add("--iterations", type=int, default=500, metavar="N", help="global batches in all (500)")
    add("--batch-size", type=int, default=32, metavar="B", help="samples per worker on average (32)")
    add("--global-batch-size", type=int, metavar="X", help="of all workers, instead of --batch-size")
    add("--samples-per-epoch", type=int, metavar="N", help=f"(default: {_EPOCH_ITERATIONS} global batches)")
    add(
        "--costs",
        metavar="COSTS",
        help='samples differ in cost: "lognormal 1.0", "uniform 1 9", or a file with a number for each sample, as text,'
        " .json or .npy (what the cluster file says)",
    )
    add("--by-count", action="store_true", help="do not tell the workers what samples cost, as a run without cost=")
    add("--gradients", metavar='"100 MB"', help="on the network (what the cluster file says)")
    add("--exchange", metavar='"2 ms"', help="what each exchange takes beside the network (0 s)")
    add("--exchange-spread", metavar='"10 %"', help="how much that varies with servers (0 %%)")
    add("--all-reduce", default="ring", metavar="KIND", help="ring or tree (ring)")
    add("--smallest-batch", type=int, metavar="N", help="of a worker (2, or 1 where 2 is not possible)")
    add("--run-dir", type=as_path, metavar="DIR", help="write all events here, a folder for each scheme")
    add("--json", action="store_true", help="print the results as JSON instead of a table")
    return parser


def _schemes(given: list[str] | None, sweeps: list[str], cluster: Cluster) -> dict[str, Scheme]:
    """The schemes to run, each once, by the names of their rows, in the order in which they were given.

    A row has the scheme's name; a row of a sweep has the swept value too if that is the default.
    """
    if given is None:
        comes_and_goes = any(worker.spot is not None for worker in cluster.workers)
        given = list(SPOT_SCHEMES if comes_and_goes else DEFAULT_SCHEMES)
    texts = [scheme for text in given for scheme in split_schemes(text)]
    if not texts:
        raise ConfigError("--schemes has no scheme in it: give one or more, such as bsp lb-bsp, or leave it out")
    unswept = set(texts)
    for sweep in sweeps:
        texts = swept(texts, sweep)
    schemes = {text: parse_scheme(text) for text in texts}
    called = {scheme.name: scheme.name if text in unswept else text for text, scheme in schemes.items()}
    return {called[scheme.name]: scheme for scheme in schemes.values()}


def _scenario(scheme: Scheme, cluster: Cluster, costs: CostsOfSamples | None, options: argparse.Namespace) -> Scenario:
    whole = options.global_batch_size
    if whole is None:
        whole = options.batch_size * len(cluster)
    message_bytes = _quantity("--gradients", options.gradients, CAPACITY)
    return Scenario(
        cluster=cluster,
        scheme=scheme,
        global_batch_size=whole,
        iterations=options.iterations,
        epoch_samples=_EPOCH_ITERATIONS * whole if options.samples_per_epoch is None else options.samples_per_epoch,
        smallest_batch=options.smallest_batch,
        message_bytes=cluster.gradient_bytes if message_bytes is None else int(message_bytes),
        exchange_seconds=_quantity("--exchange", options.exchange, DURATION) or 0.0,
        exchange_spread=_quantity("--exchange-spread", options.exchange_spread, SHARE) or 0.0,
        all_reduce=options.all_reduce,
        costs=costs,
        by_cost=not options.by_count,
    )


def _quantity(option: str, text: str | None, kind: Quantity) -> float | None:
    return None if text is None else kind.read(option, text)


def _folders(run_dir: Path | None, names: list[str]) -> Sequence[Path | None]:
    """Where the events of each row go; ConfigError if there are events already."""
    if run_dir is None:
        return [None] * len(names)
    folders: list[Path] = []
    for called in names:
        name = "".join(letter if letter.isalnum() else "-" for letter in called)[:_MAX_NAME]
        folder, number = run_dir / name, 2
        while folder in folders:  # grouped:groups=0-1/2 and groups=0/1-2 differ in nothing but signs.
            folder, number = run_dir / f"{name}-{number}", number + 1
        folders.append(folder)
        if any(folder.glob("worker-*.jsonl")):
            raise ConfigError(f"{folder} holds the events of a run already: give another --run-dir, or delete it")
    return folders


def _run(scenario: Scenario, folder: Path | None, progress: Any) -> SimulatedRun:  # noqa: ANN401 - a plain callback
    if folder is None:
        with naming(scenario.scheme.name):
            return simulate(scenario, progress=progress)
    workers = [JsonlRecorder(folder, worker) for worker in range(len(scenario.cluster))]
    server: Recorder = Silent() if scenario.scheme.served is None else JsonlRecorder(folder, 0, role="server")
    with closing(Log(workers=workers, server=server)) as log, naming(scenario.scheme.name):
        return simulate(scenario, log=log, progress=progress)


def _described(costs: CostsOfSamples | None, options: argparse.Namespace) -> str | None:
    """What the samples cost, in words."""
    if costs is None:
        return None
    return str(cast("str | None", options.costs) or costs) + (", shared out by count" if options.by_count else "")


def _show(runs: list[SimulatedRun], scenario: Scenario, costs: str | None) -> None:
    console = Console(highlight=False)
    # A narrow terminal wraps lines rather than drop the names of schemes; what is no terminal takes any line.
    console.width = max(console.width, 80 if console.is_terminal else 200)
    console.print(
        f"{len(scenario.cluster)} workers, {scenario.iterations} global batches of {scenario.global_batch_size}"
        f" samples, {scenario.length} samples an epoch{'' if costs is None else f' of costs {costs}'}; simulated."
    )
    console.print(_table(runs))


def _table(runs: Sequence[SimulatedRun]) -> Table:
    """One row per run, with its throughput relative to that of the first."""
    best = max(run.samples_per_second for run in runs)
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        collapse_padding=True,
        caption="ideal: of the sum of the workers' speeds; waiting, communication: of their time;\n"
        "staleness: versions, on average; lead: iterations, the largest",
        caption_justify="left",
    )
    table.add_column("scheme", overflow="fold", min_width=12)
    for name in (*(name for name, _ in _COLUMNS), "speed-up"):
        table.add_column(name, justify="right", no_wrap=True)
    for run in runs:
        speed_up = f"{run.samples_per_second / runs[0].samples_per_second:.2f}x"
        table.add_row(
            run.scheme if run.complete else f"{run.scheme} (all left after {run.seconds:,.0f} s)",
            *(value(run) for _, value in _COLUMNS),
            f"[bold]{speed_up}[/bold]" if run.samples_per_second == best else speed_up,
        )
    return table


def _values(runs: list[SimulatedRun], costs: CostsOfSamples | None, options: argparse.Namespace) -> dict[str, Any]:
    """The results for machines."""
    return {
        "simulated": True,
        "cluster": str(options.cluster),
        "iterations": options.iterations,
        "costs": _described(costs, options),
        "runs": [{**run.summary(), "by_worker": [asdict(worker) for worker in run.workers]} for run in runs],
    }
