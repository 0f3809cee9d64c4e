"""The demo's training runs: the same script, seed and emulated cluster under one scheme after the other."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

from evenstep.cli import run as run_subcommand
from evenstep.cli.demonstration.setting import BATCH_SIZE, CLUSTER, EPOCHS, SEED, WORKERS, folder_of, write_digits
from evenstep.core.errors import ConfigError
from evenstep.report.overview import RunOverview, overview_of
from evenstep.report.recorded import read_run

_OUTPUT: Final = "output"


def train(folder: Path, schemes: Sequence[str], watch: AbstractContextManager[None]) -> list[RunOverview]:
    """Train under each scheme in turn, with one start of the workers and inside `watch`; all files go to `folder`.

    Raises:
        ConfigError: The folder cannot be written, or holds a demo already.
        RunFailedError: A worker failed.
    """
    data, cluster = folder / "digits.npz", folder / "cluster.toml"
    if any((folder / folder_of(scheme)).exists() for scheme in schemes):
        raise ConfigError(f"the run directory {folder} holds a demo already: give another or empty it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        cluster.write_text(CLUSTER, encoding="utf-8")
        write_digits(data)
    except OSError as error:
        raise ConfigError(f"the run directory {folder} cannot be written ({error.strerror}): give another") from error
    # The workers' output goes to files, so that it does not disturb the progress bar.
    options = ["--workers", WORKERS, "--emulate", cluster, "--redirects", 3, "--log-dir", folder / _OUTPUT]
    script = [Path(__file__).with_name("train.py"), "--data", data, "--batch-size", BATCH_SIZE, "--epochs", EPOCHS]
    arguments = [*options, *script, "--seed", SEED, "--run-dirs", folder, "--schemes", *schemes]
    with watch:
        run_subcommand.start(run_subcommand.parse([str(each) for each in arguments]))
    recorded = [read_run(folder / folder_of(scheme)) for scheme in schemes]
    return [overview_of(run.scheme, run) for run in recorded]


def worker_output(folder: Path, worker: int) -> str:
    """What a worker of the latest run wrote to its stderr."""
    logs = sorted(folder.glob(f"{_OUTPUT}/*/attempt_0/{worker}/stderr.log"), key=lambda path: path.stat().st_mtime)
    return logs[-1].read_text(encoding="utf-8", errors="replace") if logs else ""
