"""The demo's training runs: the same script, seed and emulated cluster under one scheme after the other."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, final

from evenstep.cli import run as run_verb
from evenstep.cli.demo_setup import BATCH_SIZE, CLUSTER, EPOCHS, SEED, WORKERS, write_digits
from evenstep.core.errors import ConfigError
from evenstep.report.accuracy import Evaluation, read_evaluations
from evenstep.report.recorded import RecordedRun, read_run
from evenstep.report.summary import RunSummary, summary_of

SCHEMES: Final = ("bsp", "lb-bsp")
_OUTPUT: Final = "output"


class Watch(Protocol):
    """Shows how far a run is while the block lasts."""

    def __call__(self, scheme: str, run_dir: Path) -> AbstractContextManager[None]:
        """The run under this scheme, with this run directory, is about to start."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRun:
    """One finished run."""

    recorded: RecordedRun
    summary: RunSummary
    evaluations: tuple[Evaluation, ...]


def train(folder: Path, watch: Watch) -> list[DemoRun]:
    """Train under each scheme in turn, with everything that belongs to it in `folder`.

    Raises:
        ConfigError: The folder cannot be written, or holds a demo already.
        RunFailedError: A worker failed.
    """
    data, cluster = folder / "digits.npz", folder / "cluster.toml"
    used = [scheme for scheme in SCHEMES if (folder / scheme).exists()]
    if used:
        raise ConfigError(f"the run directory {folder} holds a demo already: give another or empty it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        cluster.write_text(CLUSTER, encoding="utf-8")
        write_digits(data)
    except OSError as error:
        raise ConfigError(f"the run directory {folder} cannot be written ({error.strerror}): give another") from error
    runs = []
    for scheme in SCHEMES:
        run_dir = folder / scheme
        evaluations = folder / f"{scheme}-evaluations.jsonl"
        with watch(scheme, run_dir):
            run_verb.start(run_verb.parse(_arguments(scheme, run_dir, cluster, data, evaluations)))
        recorded = read_run(run_dir)
        runs.append(DemoRun(recorded=recorded, summary=summary_of(recorded), evaluations=read_evaluations(evaluations)))
    return runs


def worker_output(folder: Path, worker: int) -> str:
    """What a worker of the latest run wrote to its stderr."""
    logs = sorted(folder.glob(f"*/{_OUTPUT}/*/attempt_0/{worker}/stderr.log"), key=lambda path: path.stat().st_mtime)
    return logs[-1].read_text(encoding="utf-8", errors="replace") if logs else ""


def _arguments(scheme: str, run_dir: Path, cluster: Path, data: Path, evaluations: Path) -> list[str]:
    """What a user would type behind `evenstep run`; the workers' output goes to files, for the progress bar's sake."""
    options = {
        "--workers": WORKERS,
        "--scheme": scheme,
        "--emulate": cluster,
        "--run-dir": run_dir,
        "--redirects": 3,
        "--log-dir": run_dir / _OUTPUT,
    }
    script_options = {
        "--data": data,
        "--batch-size": BATCH_SIZE,
        "--epochs": EPOCHS,
        "--seed": SEED,
        "--evaluations": evaluations,
    }
    script = Path(__file__).with_name("demo_train.py")
    return [*_flat(options), str(script), *_flat(script_options)]


def _flat(options: dict[str, object]) -> list[str]:
    return [text for name, value in options.items() for text in (name, str(value))]
