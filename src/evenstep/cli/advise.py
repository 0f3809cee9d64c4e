"""`evenstep advise`: which scheme is best on these machines, and what is to be gained over plain DDP."""

import json
from pathlib import Path
from typing import Final

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from evenstep.advice import Advice, Machines, advise, described_machines, measured_machines
from evenstep.advice.advise import EXACT, STALE
from evenstep.cli.arguments import Parser, as_path, require_run_dir
from evenstep.cli.simulate_schemes import split_schemes
from evenstep.cluster import Cluster
from evenstep.cluster.record import CAPACITY
from evenstep.core.errors import ConfigError
from evenstep.launch.launch_settings import read_cluster
from evenstep.report.recorded import read_run

_DESCRIPTION: Final = """\
Say which scheme is best on these machines, what it gains over plain DDP, and why.

Give the run directory of a run on them (--run-dir of evenstep run; 50 iterations under any scheme are enough, lb-bsp
tells most), a cluster file, or both: then speeds are those of the run, and links and memory those of the file. The
schemes are simulated on the times that were measured, iteration by iteration."""
_FAR: Final = 0.1
_MANY: Final = 64


def main(arguments: list[str]) -> int:
    """Run the subcommand."""
    options = make_parser().parse(arguments)
    run_dir, cluster = _inputs(options.inputs)
    machines = _machines(run_dir, cluster, options.global_batch_size)
    schemes = [each for text in options.schemes or [] for each in split_schemes(text)]
    gradients = options.gradients and int(CAPACITY.read("--gradients", options.gradients))
    # On servers each iteration of each worker is an event: with hundreds of workers, minutes for each scheme.
    usual = EXACT if len(machines.cluster) > _MANY else (*EXACT, *STALE)
    console = Console(stderr=True, highlight=False)
    with Progress(TextColumn("{task.description}"), BarColumn(), console=console, transient=True) as shown:
        task = shown.add_task("simulating", total=1.0)
        advice = advise(
            machines,
            schemes=schemes or usual,
            message_bytes=gradients or (None if cluster is None else cluster.gradient_bytes),
            progress=lambda part: shown.update(task, completed=part),
        )
    if options.json:
        print(json.dumps(advice.values))
    else:
        _show(advice)
    return 0


def make_parser() -> Parser:
    """The options."""
    parser = Parser(prog="evenstep advise", description=_DESCRIPTION, example="evenstep advise runs/a")
    add = parser.add_argument
    add("inputs", nargs="+", type=as_path, metavar="RUN_DIR|CLUSTER.toml", help="a run, a cluster file, or both")
    add("--schemes", nargs="+", metavar="SCHEME", help=f"what to compare with bsp ({' '.join((*EXACT[1:], *STALE))})")
    add("--global-batch-size", type=int, metavar="X", help="(32 samples per worker, or the run's)")
    add("--gradients", metavar='"100 MB"', help="on the links (what the cluster file says)")
    add("--json", action="store_true", help="print the advice as JSON")
    return parser


def _inputs(paths: list[Path]) -> tuple[Path | None, Cluster | None]:
    files = [path for path in paths if path.suffix == ".toml"]
    folders = [path for path in paths if path.suffix != ".toml"]
    if len(files) > 1 or len(folders) > 1:
        raise ConfigError("evenstep advise takes one run directory, one cluster file, or one of each")
    for folder in folders:
        require_run_dir(folder)
    return (folders[0] if folders else None, read_cluster(files[0]) if files else None)


def _machines(run_dir: Path | None, cluster: Cluster | None, global_batch_size: int | None) -> Machines:
    if run_dir is not None:
        if global_batch_size is not None:
            raise ConfigError("--global-batch-size is for a cluster file: a run has its own, so leave it out")
        return measured_machines(read_run(run_dir), cluster)
    assert cluster is not None
    if global_batch_size is not None and global_batch_size < len(cluster):
        raise ConfigError(f"--global-batch-size must be at least {len(cluster)}, a sample per worker")
    return described_machines(cluster, global_batch_size or 32 * len(cluster))


def _show(advice: Advice) -> None:
    console = Console(highlight=False)
    console.width = max(console.width, 80 if console.is_terminal else 200)
    console.print(f"[bold]{advice.text}[/bold]", soft_wrap=True)
    for sentence in advice.why:
        console.print(f"  {sentence}", soft_wrap=True)
    console.print()
    console.print(_table(advice))
    if advice.measured is not None and advice.simulated is not None:
        off = advice.simulated / advice.measured - 1
        line = (
            f"The run trained {advice.measured:,.0f} samples/s; its simulation gives {advice.simulated:,.0f}"
            f" ({off:+.0%})."
        )
        if abs(off) > _FAR:
            line += " They differ by much: something was not measured, so take the figures above for rough ones."
        console.print(line, soft_wrap=True)


def _table(advice: Advice) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    table.add_column("scheme", no_wrap=True)
    for name in ("samples/s", "over plain DDP", "staleness"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in advice.figures:
        row = (
            each.scheme,
            f"{each.samples_per_second:,.0f}",
            f"{each.speed_up:.2f}x",
            "" if each.exact else f"{each.staleness:.1f}",
        )
        table.add_row(*row, style="bold" if each is advice.pick else "")
    return table
