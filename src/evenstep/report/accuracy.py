"""How accurate the model became, and how soon; from evaluations that a training script writes down itself."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from evenstep.report.recorded import RecordedRun


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The share of the test data that the model had right, 0 to 1, after so many iterations."""

    iterations: int
    accuracy: float


def read_evaluations(path: Path) -> tuple[Evaluation, ...]:
    """The evaluations in a file of JSON lines with the keys `iterations` and `accuracy`."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return tuple(Evaluation(**json.loads(line)) for line in lines)


def seconds_until(accuracy: float, evaluations: Sequence[Evaluation], run: RecordedRun) -> float | None:
    """Seconds of training until an evaluation first showed this accuracy, or None where none did.

    Evaluating itself counts nothing, and neither does starting up.
    """
    for evaluation in evaluations:
        if evaluation.accuracy >= accuracy:
            iterations = run.iterations[run.workers[0]]
            return sum(each.iteration_seconds for each in iterations[: evaluation.iterations])
    return None
