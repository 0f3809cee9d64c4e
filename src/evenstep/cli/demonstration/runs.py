"""The demo's training runs: the same script, seed and emulated cluster under one scheme after the other."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from evenstep.cli import run as run_subcommand
from evenstep.cli.demonstration.setting import BATCH_SIZE, CLUSTER, EPOCHS, SEED, WORKERS, folder_of, write_digits
from evenstep.core.errors import ConfigError
from evenstep.report.accuracy import Evaluation, evaluations_of
from evenstep.report.recorded import RecordedRun, read_run
from evenstep.report.summary import RunSummary, summary_of

_OUTPUT: Final = "output"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRun:
    """One finished run."""

    recorded: RecordedRun
    summary: RunSummary
    evaluations: tuple[Evaluation, ...]


def train(folder: Path, schemes: Sequence[str], watch: AbstractContextManager[None]) -> list[DemoRun]:
    """Train under each scheme in turn with one start of the workers; everything is in `folder`.

    `watch` shows how far it is.

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
    with watch:
        run_subcommand.start(run_subcommand.parse(_arguments(schemes, folder, cluster, data)))
    runs = []
    for scheme in schemes:
        recorded = read_run(folder / folder_of(scheme))
        runs.append(DemoRun(recorded=recorded, summary=summary_of(recorded), evaluations=evaluations_of(recorded)))
    return runs


def worker_output(folder: Path, worker: int) -> str:
    """What a worker of the latest run wrote to its stderr."""
    logs = sorted(folder.glob(f"{_OUTPUT}/*/attempt_0/{worker}/stderr.log"), key=lambda path: path.stat().st_mtime)
    return logs[-1].read_text(encoding="utf-8", errors="replace") if logs else ""


def _arguments(schemes: Sequence[str], folder: Path, cluster: Path, data: Path) -> list[str]:
    """What a user would type behind `evenstep run`; the workers' output goes to files, for the progress bar's sake."""
    options = {"--workers": WORKERS, "--emulate": cluster, "--redirects": 3, "--log-dir": folder / _OUTPUT}
    script_options = {
        "--data": data,
        "--batch-size": BATCH_SIZE,
        "--epochs": EPOCHS,
        "--seed": SEED,
        "--run-dirs": folder,
    }
    script = Path(__file__).with_name("train.py")
    return [*_flat(options), str(script), *_flat(script_options), "--schemes", *schemes]


def _flat(options: Mapping[str, object]) -> list[str]:
    return [text for name, value in options.items() for text in (name, str(value))]
