"""How accurate the model became, and how soon; from what a training script notes of its evaluations."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from evenstep.report.recorded import RecordedRun


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The share of the test data that the model had right, 0 to 1, after so many iterations."""

    iterations: int
    accuracy: float


def evaluations_of(run: RecordedRun) -> tuple[Evaluation, ...]:
    """What the first worker noted as `accuracy`; on servers, after so many iterations of its own."""
    notes = run.told.notes.get("accuracy", ())
    first = run.workers[0]
    return tuple(
        Evaluation(iterations=note.iteration + 1, accuracy=note.value) for note in notes if note.worker == first
    )


def seconds_until(accuracy: float, evaluations: Sequence[Evaluation], run: RecordedRun) -> float | None:
    """Seconds of training until an evaluation first showed this accuracy, or None where none did.

    Evaluating itself counts nothing, and neither does starting up.
    """
    for evaluation in evaluations:
        if evaluation.accuracy >= accuracy:
            done = run.iterations[run.workers[0]]
            return float(done.iteration_seconds[: evaluation.iterations].sum())
    return None
