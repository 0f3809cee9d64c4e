"""`evenstep plan`: which scheme is best on these machines, and what it gains, from a run, a description or a script."""

import argparse
import json
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from evenstep.advice import Advice, Machines, advise, described_machines, measured_machines
from evenstep.advice.advise import EXACT, STALE
from evenstep.cli import run as run_subcommand
from evenstep.cli.arguments import Parser, as_path, require_run_dir, require_torch, require_writable, write_text
from evenstep.cli.simulated import inputs_first, output, plain_table, scheme_table, split_schemes
from evenstep.cluster import Cluster, parse_cluster
from evenstep.cluster.record import CAPACITY
from evenstep.core.errors import ConfigError
from evenstep.launch.launch_settings import read_cluster
from evenstep.launch.survey import Survey
from evenstep.report.recorded import read_run

_DESCRIPTION: Final = """\
Say which scheme is best on these machines, what it gains over plain DDP, and why. The schemes are simulated on

  RUN_DIR        what a run has measured (--run-dir of evenstep run): 50 iterations under any scheme are enough
  CLUSTER.toml   what a cluster file describes; with a RUN_DIR, its links and memory, and the speeds of the run
  -- SCRIPT      what this training script takes on its workers. They start as under evenstep run, compute ever larger
                 batches and then the script's own, and end; nothing is trained

Before the -- may stand options of evenstep run, such as --workers 4. With several nodes, start it on each of them; the
one with worker 0 prints the plan."""
_USAGE: Final = "evenstep plan [options] (RUN_DIR | CLUSTER.toml | RUN_DIR CLUSTER.toml | -- SCRIPT [arguments])"
_EXAMPLE: Final = "evenstep plan --workers 4 -- train.py --epochs 10"
_LARGEST: Final = 4096  # Samples of a worker; most devices are full far below.
_DECIDED: Final = ("scheme", "batch_sizes", "resume", "framework")
"""Options of `evenstep run` that would change what is measured."""


def main(arguments: list[str]) -> int:
    """Run the subcommand."""
    options = parse(arguments)
    survey = None
    if options.launched is not None:
        survey = _surveyed(options)
        if survey is None:
            print("evenstep: worker 0 is on another host, which prints the plan", file=sys.stderr)
            return 0
    elif len(options.inputs) == 1 and not any(options.inputs[0].glob("worker-*.jsonl")):
        survey = Survey.read(options.inputs[0])
    advice = _advice(options, survey)
    if options.json:
        values = {} if advice is None else advice.values
        print(json.dumps(values if survey is None else values | _survey_values(survey)), flush=True)
    else:
        _show(output(), options, survey, advice)
    if options.save_cluster is not None and survey is not None:
        _save(survey, options)
    return 0


def make_parser() -> Parser:
    """Make the parser of the options without a script; before a script, the options of `evenstep run` are added."""
    parser = _own_parser()
    parser.add_argument("inputs", nargs="*", type=as_path, metavar="RUN_DIR|CLUSTER.toml", help="a run, a cluster file")
    return parser


def _own_parser() -> Parser:
    parser = Parser(prog="evenstep plan", description=_DESCRIPTION, example=_EXAMPLE)
    parser.usage = _USAGE
    add = parser.add_argument
    add("--schemes", nargs="+", metavar="SCHEME", help=f"what to compare with bsp ({' '.join((*EXACT[1:], *STALE))})")
    add("--global-batch-size", type=int, metavar="X", help="(the script's, or 32 per worker of a cluster file)")
    add("--gradients", metavar='"100 MB"', help="on the links (what the cluster file says)")
    add("--largest", type=int, metavar="B", help=f"the largest batch of a worker that a script tries ({_LARGEST})")
    add("--save-cluster", type=as_path, metavar="FILE.toml", help="write what a script took as a cluster file")
    add("--json", action="store_true", help="print the plan as JSON")
    return parser


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the options; `launched` are the options of `evenstep run` with a script, None without a script.

    Raises:
        ConfigError: They are wrong, or exclude each other.
    """
    if "--" in arguments:
        return _parse_with_script(arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :])
    script = next((each for each in arguments if not each.endswith(".toml") and Path(each).is_file()), None)
    if script is not None:
        raise ConfigError(f"{script} is not a run directory: if it is a script, put -- before it")
    options = make_parser().parse(inputs_first(arguments))
    if not options.inputs:
        raise ConfigError("evenstep plan needs a run directory, a cluster file, or a script after --")
    for name in ("largest", "save_cluster"):
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} is for a script, which stands after --")
    options.launched = None
    return options


def _parse_with_script(before: list[str], script: list[str]) -> argparse.Namespace:
    require_torch("plan")
    options, others = _own_parser().parse_known_args(before)
    if not script:
        raise ConfigError("evenstep plan -- needs a training script after the --")
    options.launched = launched = run_subcommand.parse([*others, *script])
    for name in _DECIDED:
        if getattr(launched, name):
            raise ConfigError(
                f"evenstep plan has no --{name.replace('_', '-')}: it tries sizes of its own, and compares schemes"
            )
    if options.largest is not None and options.largest < 1:
        raise ConfigError(f"--largest must be at least 1, not {options.largest}")
    if options.save_cluster is not None:
        require_writable(options.save_cluster)
    return options


def _surveyed(options: argparse.Namespace) -> Survey | None:
    """Measure the script on its workers; None if worker 0, which has the result, is on another host."""
    script = options.launched.training_script
    print(f"evenstep: measuring {script} at ever larger batches; what it trains is not kept", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="evenstep-") as folder:
        marks = Path(folder)
        run_subcommand.start(options.launched, marks=marks, survey_up_to=options.largest or _LARGEST)
        survey = Survey.read(marks)
        if survey is None and (any(marks.glob("0")) or not any(marks.iterdir())):
            raise ConfigError(
                f"{script} ended before enough was measured: it must call evenstep.prepare and train on the loader that"
                " it returns, for long enough"
            )
    return survey


def _advice(options: argparse.Namespace, survey: Survey | None) -> Advice | None:
    """Return the advice; None for one worker, which waits for no other."""
    cluster = None
    if survey is None:
        machines, cluster = _machines(options.inputs, options.global_batch_size)
    elif len(survey.workers) > 1:
        measured, others = survey.cluster, np.array([each.outside_seconds for each in survey.workers])
        machines = described_machines(
            measured,
            _at_least_one_each(options.global_batch_size or survey.global_batch_size, measured),
            exchange_seconds=survey.exchange_seconds,
            others=others - others.min(),
        )
    else:
        return None
    gradients = options.gradients and int(CAPACITY.read("--gradients", options.gradients))
    # On servers each iteration of each worker is an event: with hundreds of workers, minutes for each scheme.
    usual = EXACT if len(machines.cluster) > 64 else (*EXACT, *STALE)
    with Console(stderr=True).status("simulating"):
        return advise(
            machines,
            schemes=[each for text in options.schemes or [] for each in split_schemes(text)] or usual,
            message_bytes=gradients or (None if cluster is None else cluster.gradient_bytes),
        )


def _machines(inputs: list[Path], global_batch_size: int | None) -> tuple[Machines, Cluster | None]:
    """Return what a run has measured, a cluster file describes, or both; and the cluster file's cluster."""
    files = [path for path in inputs if path.suffix == ".toml"]
    folders = [path for path in inputs if path.suffix != ".toml"]
    if len(files) > 1 or len(folders) > 1:
        raise ConfigError("evenstep plan takes one run directory, one cluster file, or one of each")
    for folder in folders:
        require_run_dir(folder)
    cluster = read_cluster(files[0]) if files else None
    if folders:
        if global_batch_size is not None:
            raise ConfigError("--global-batch-size is for a cluster file: a run has its own, so leave it out")
        return measured_machines(read_run(folders[0]), cluster), cluster
    assert cluster is not None
    return described_machines(cluster, _at_least_one_each(global_batch_size or 32 * len(cluster), cluster)), cluster


def _at_least_one_each(global_batch_size: int, cluster: Cluster) -> int:
    if global_batch_size < len(cluster):
        raise ConfigError(f"--global-batch-size must be at least {len(cluster)}, a sample per worker")
    return global_batch_size


def _show(console: Console, options: argparse.Namespace, survey: Survey | None, advice: Advice | None) -> None:
    if survey is not None:
        _show_survey(console, survey, kept=options.launched.run_dir if options.launched else options.inputs[0])
    if advice is None:
        console.print("One worker waits for no other: give --workers to compare schemes.", soft_wrap=True)
        return
    console.print(f"[bold]{advice.text}[/bold]", soft_wrap=True)
    for sentence in advice.why:
        console.print(f"  {sentence}", soft_wrap=True)
    console.print()
    console.print(scheme_table(advice.runs, advice.pick.scheme))
    if advice.measured is not None and advice.simulated is not None:
        off = advice.simulated / advice.measured - 1
        line = (
            f"After its start, the run trained {advice.measured:,.0f} samples/s; its simulation gives"
            f" {advice.simulated:,.0f} ({off:+.0%})."
        )
        if abs(off) > 0.1:
            line += " They differ by much: something was not measured, so take the figures above for rough ones."
        console.print(line, soft_wrap=True)


def _survey_values(survey: Survey) -> dict[str, Any]:
    workers = [
        msgspec.to_builtins(each) | {"samples_per_second": each.samples_per_second, "full_from": each.full_from}
        for each in survey.workers
    ]
    about = {"exchange_seconds": survey.exchange_seconds, "warnings": list(survey.warnings())}
    return {**msgspec.to_builtins(survey), "workers": workers, **about}


def _show_survey(console: Console, survey: Survey, *, kept: Path | None) -> None:
    """Print it; `kept` is the run directory that has it for the next start."""
    for host, (first, *_) in survey.hosts.items():
        versions = ", ".join(f"{name} {version}" for name, version in first.versions.items())
        console.print(f"[bold]{host}[/bold]: {first.processors} processors, {versions}", soft_wrap=True)
    for sentence in survey.warnings():
        console.print(f"[bold]Warning[/bold]: {sentence}.", soft_wrap=True)
    console.print()
    console.print(_survey_table(survey))
    size, unit = survey.largest_global_batch, "average samples" if survey.by_cost else "samples"
    more = any(each.more for each in survey.workers)
    fits, together = ("fits", f"{survey.together} or more") if more else ("uses every device fully", survey.together)
    use = f"global_batch_size={size})" if kept is None else f'global_batch_size="auto") with --run-dir {kept}'
    then = f" To train with it: prepare(..., {use}."
    if size == survey.length:
        fits, then = "is the whole data set, and fits", ""
    console.print(
        f"A global batch of {size} {unit} {fits}, with sizes by speed; all hold {together}.{then}",
        soft_wrap=True,
        markup=False,
    )
    if len(survey.workers) > 1:
        console.print(
            f"Besides compute, an iteration of {survey.global_batch_size} {unit} takes"
            f" {1e3 * survey.exchange_seconds:.1f} ms, in the script and to sum {survey.gradient_bytes:,} bytes of"
            " gradients.",
            soft_wrap=True,
        )
    console.print()


def _survey_table(survey: Survey) -> Table:
    """Make a row for each worker: its device, the largest batch that it holds, and its speed with that."""
    unit = "average samples" if survey.by_cost else "samples"
    table = plain_table(f"{unit}/s: with its largest batch; 90 % from: the smallest batch with 90 % of the best speed")
    table.add_column("worker", justify="right")
    for name in ("host", "device"):
        table.add_column(name, no_wrap=True)
    for name in ("memory", f"holds, {unit}", "90 % from", f"{unit}/s"):
        table.add_column(name, justify="right")
    for each in survey.workers:
        table.add_row(
            str(each.worker),
            each.host,
            each.device,
            "" if each.memory_bytes is None else f"{each.memory_bytes / 1e9:,.1f} GB",
            f"{each.holds:,}{' or more' if each.more else ''}",
            f"{each.full_from:,}",
            f"{each.samples_per_second:,.1f}",
        )
    return table


def _save(survey: Survey, options: argparse.Namespace) -> None:
    text = survey.cluster_file(
        f"evenstep plan of {options.launched.training_script} on {platform.node()}; simulate it with"
        f' --exchange "{1e3 * survey.exchange_seconds:.2f} ms"'
    )
    parse_cluster(text, name="what was measured")  # Refuses what was measured at too few sizes.
    write_text(options.save_cluster, text)
    print(f"evenstep: wrote {options.save_cluster}", file=sys.stderr)
