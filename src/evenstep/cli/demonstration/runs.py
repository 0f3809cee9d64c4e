"""The demo's training runs: the same script, seed and emulated cluster under one scheme after the other."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from evenstep.cli import run as run_subcommand
from evenstep.cli.demonstration.setting import BATCH_SIZE, CLUSTER, EPOCHS, SEED, WORKERS, folder_of
from evenstep.core.errors import ConfigError
from evenstep.report.overview import RunOverview, overview_of
from evenstep.report.recorded import read_run
from evenstep.telemetry.recorder import writing_to

_OUTPUT: Final = "output"


def train(folder: Path, schemes: Sequence[str]) -> list[RunOverview]:
    """Train under each scheme in turn, with one start of the workers; all files go to `folder`.

    Raises:
        ConfigError: The folder cannot be written, or holds a demo already.
        RunFailedError: A worker failed.
    """
    cluster = folder / "cluster.toml"
    if any((folder / folder_of(scheme)).exists() for scheme in schemes):
        raise ConfigError(f"the run directory {folder} holds a demo already: give another or empty it")
    with writing_to(folder):
        cluster.write_text(CLUSTER, encoding="utf-8")
    # The workers' output goes to files, so that it does not disturb the terminal.
    options = ["--workers", WORKERS, "--emulate", cluster, "--redirects", 3, "--log-dir", folder / _OUTPUT]
    script = [Path(__file__).with_name("train.py"), "--batch-size", BATCH_SIZE, "--epochs", EPOCHS]
    arguments = [*options, *script, "--seed", SEED, "--run-dirs", folder, "--schemes", *schemes]
    run_subcommand.start(run_subcommand.parse([str(each) for each in arguments]))
    recorded = [read_run(folder / folder_of(scheme)) for scheme in schemes]
    return [overview_of(run.scheme, run) for run in recorded]


def worker_output(folder: Path, worker: int) -> str:
    """Return what a worker of the latest run wrote to its stderr."""
    logs = sorted(folder.glob(f"{_OUTPUT}/*/attempt_0/{worker}/stderr.log"), key=lambda path: path.stat().st_mtime)
    return logs[-1].read_text(encoding="utf-8", errors="replace") if logs else ""
