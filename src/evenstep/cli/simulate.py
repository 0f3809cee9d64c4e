"""`evenstep simulate`: what each scheme would do on a cluster that one need not have, in virtual time."""

import json
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from evenstep.cli.parser import Parser, as_path
from evenstep.cli.simulate_schemes import split_schemes, swept
from evenstep.cli.simulate_table import simulated_table
from evenstep.cluster import Cluster
from evenstep.cluster.quantity import CAPACITY, DURATION, SHARE, Quantity
from evenstep.cluster.table import placed
from evenstep.core.errors import ConfigError
from evenstep.launch.launch_settings import read_cluster
from evenstep.schemes import Scheme, parse_scheme
from evenstep.sim import Log, Scenario, SimulatedRun, simulate
from evenstep.telemetry import JsonlRecorder, Recorder, Silent

DEFAULT_SCHEMES: Final = ("bsp", "lb-bsp", "dbs", "ssp", "dssp", "asp")
SPOT_SCHEMES: Final = ("bsp:engine=server", "ssp", "dssp", "asp", "asp:load=lb-bsp")
"""Instead of those, where workers come and go, which needs servers."""

_EPOCH_ITERATIONS: Final = 100
_LONGEST_NAME: Final = 200
"""Of a folder, in letters; file systems end at 255 bytes."""

_DESCRIPTION = """\
Run schemes on a cluster in virtual time: the very decisions that a real run takes, without the machines.

The cluster file says who computes how fast, what disturbs them and which links they share (evenstep run --emulate takes
the same file). Without links, communication costs nothing but --exchange.

A scheme is what evenstep run --scheme takes. Several stand apart by spaces or by commas, whichever is handier: a comma
within a scheme (dssp:lower=3,upper=15) is told from one between schemes by the = that follows it."""
_EXAMPLE = "evenstep simulate examples/clusters/two-generations.toml --schemes bsp lb-bsp ssp --sweep bound=1:4"


def run_simulate(arguments: list[str]) -> int:
    """Run the subcommand."""
    options = _parser().parse(_cluster_first(arguments))
    cluster = read_cluster(options.cluster)
    schemes = _schemes(options.schemes, options.sweep, cluster)
    scenarios = {name: _scenario(scheme, cluster, options) for name, scheme in schemes.items()}
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
        print(json.dumps(_values(runs, options)))
    else:
        _show(runs, next(iter(scenarios.values())))
    if options.run_dir is not None:
        console.print(f"The events are in {options.run_dir}.", markup=False, soft_wrap=True)
    return 0


def _cluster_first(arguments: list[str]) -> list[str]:
    """The same, with a cluster file that ends the list of --schemes, which argparse would take for one, in front."""
    if "--schemes" not in arguments:
        return arguments
    begin = arguments.index("--schemes") + 1
    end = next((at for at in range(begin, len(arguments)) if arguments[at].startswith("--")), len(arguments))
    if end - begin < 2 or not arguments[end - 1].endswith(".toml"):
        return arguments
    return [arguments[end - 1], *arguments[: end - 1], *arguments[end:]]


def _parser() -> Parser:
    parser = Parser(prog="evenstep simulate", description=_DESCRIPTION, example=_EXAMPLE)
    parser.add_argument("cluster", type=as_path, metavar="CLUSTER.toml", help="the cluster file")
    parser.add_argument(
        "--schemes",
        nargs="+",
        metavar="SCHEME",
        help=f"(default: {' '.join(DEFAULT_SCHEMES)}; where workers come and go: {' '.join(SPOT_SCHEMES)})",
    )
    parser.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="NAME=FROM:TO",
        help="run the schemes that have this parameter once with each whole number, as in bound=1:16, lower=2:8:2 (in"
        " steps) or predictor=ema/narx (one after another); repeatable",
    )
    parser.add_argument("--iterations", type=int, default=500, metavar="N", help="global batches in all (500)")
    parser.add_argument("--batch-size", type=int, default=32, metavar="B", help="samples per worker on average (32)")
    parser.add_argument("--global-batch-size", type=int, metavar="X", help="of all workers, instead of --batch-size")
    parser.add_argument(
        "--samples-per-epoch", type=int, metavar="N", help=f"(default: {_EPOCH_ITERATIONS} global batches)"
    )
    parser.add_argument("--gradients", metavar='"100 MB"', help="what a worker's gradients take on the network")
    parser.add_argument("--exchange", metavar='"2 ms"', help="what each exchange takes beside the network (0 s)")
    parser.add_argument("--exchange-spread", metavar='"10 %"', help="how much that varies with servers (0 %%)")
    parser.add_argument("--all-reduce", default="ring", metavar="KIND", help="ring or tree (ring)")
    parser.add_argument("--smallest-batch", type=int, default=1, metavar="N", help="of a worker; 2 with BatchNorm (1)")
    parser.add_argument(
        "--run-dir", type=as_path, metavar="DIR", help="write all events here, a folder for each scheme"
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of a table")
    return parser


def _schemes(given: list[str] | None, sweeps: list[str], cluster: Cluster) -> dict[str, Scheme]:
    """The schemes to run, each once, by what its row is called, in the order in which they were asked for.

    A row is called by the scheme's name; one of a sweep by the swept value too where that is the default.

    Raises:
        ConfigError: There is none, or one is not known, or a sweep sweeps nothing.
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


def _scenario(scheme: Scheme, cluster: Cluster, options: Any) -> Scenario:  # noqa: ANN401 - argparse has no types
    whole = options.global_batch_size
    if whole is None:
        whole = options.batch_size * len(cluster)
    return Scenario(
        cluster=cluster,
        scheme=scheme,
        global_batch_size=whole,
        iterations=options.iterations,
        epoch_samples=_EPOCH_ITERATIONS * whole if options.samples_per_epoch is None else options.samples_per_epoch,
        smallest_batch=options.smallest_batch,
        message_bytes=None if options.gradients is None else int(_quantity("--gradients", options.gradients, CAPACITY)),
        exchange_seconds=0.0 if options.exchange is None else _quantity("--exchange", options.exchange, DURATION),
        exchange_spread=(
            0.0 if options.exchange_spread is None else _quantity("--exchange-spread", options.exchange_spread, SHARE)
        ),
        all_reduce=options.all_reduce,
    )


def _quantity(option: str, text: str, kind: Quantity) -> float:
    try:
        return kind.parse(text)
    except ConfigError as error:
        raise ConfigError(f"{option} {error}") from None


def _folders(run_dir: Path | None, names: list[str]) -> list[Path | None]:
    """Where the events of each row go.

    Raises:
        ConfigError: There are events already.
    """
    if run_dir is None:
        return [None] * len(names)
    folders: list[Path] = []
    for called in names:
        name = "".join(letter if letter.isalnum() else "-" for letter in called)[:_LONGEST_NAME]
        folder, number = run_dir / name, 2
        while folder in folders:  # grouped:groups=0-1/2 and groups=0/1-2, which differ in nothing but signs.
            folder, number = run_dir / f"{name}-{number}", number + 1
        folders.append(folder)
    for folder in folders:
        if any(folder.glob("worker-*.jsonl")):
            raise ConfigError(f"{folder} holds the events of a run already: give another --run-dir, or delete it")
    return list(folders)


def _run(scenario: Scenario, folder: Path | None, progress: Any) -> SimulatedRun:  # noqa: ANN401 - a plain callback
    if folder is None:
        with placed(scenario.scheme.name):
            return simulate(scenario, progress=progress)
    workers = [JsonlRecorder(folder, worker) for worker in range(len(scenario.cluster))]
    server: Recorder = Silent() if scenario.scheme.served is None else JsonlRecorder(folder, 0, role="server")
    with closing(Log(workers=workers, server=server)) as log, placed(scenario.scheme.name):
        return simulate(scenario, log=log, progress=progress)


def _show(runs: list[SimulatedRun], scenario: Scenario) -> None:
    console = Console(highlight=False)
    # Rather lines that a narrow terminal wraps than schemes without a name; what is no terminal takes any line.
    console.width = max(console.width, 80 if console.is_terminal else 200)
    console.print(
        f"{len(scenario.cluster)} workers, {scenario.iterations} global batches of {scenario.global_batch_size}"
        f" samples, {scenario.length} samples an epoch; simulated."
    )
    console.print(simulated_table(runs))


def _values(runs: list[SimulatedRun], options: Any) -> dict[str, Any]:  # noqa: ANN401 - argparse has no types
    """The results for machines."""
    return {
        "simulated": True,
        "cluster": str(options.cluster),
        "iterations": options.iterations,
        "runs": [{**run.summary(), "by_worker": [asdict(worker) for worker in run.workers]} for run in runs],
    }
