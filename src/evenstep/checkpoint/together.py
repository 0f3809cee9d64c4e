"""Steps that all workers take together. If one of them fails, all raise, instead of waiting for it."""

from collections.abc import Callable
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from evenstep.core.activity import Doing
from evenstep.core.errors import CheckpointError, EvenstepError, WorkerLostError
from evenstep.core.shown import first_line
from evenstep.torch.engines.engine import Engine
from evenstep.torch.processes.workers import gather


def together(engine: Engine, part: Callable[[], Any]) -> list[Any]:
    """Do this worker's part; return the results of all workers by rank, after a round trip through JSON.

    Raises:
        EvenstepError: A part failed on this worker or on another, which the error names.
        WorkerLostError: Another worker is gone or did not take part; the error names it.
    """
    failure: EvenstepError | None = None
    value = None
    activity = engine.tracker.activity
    try:
        with activity.doing(Doing.CHECKPOINTING):
            value = part()
    # RuntimeError: a collective failed with its peer, or a state does not fit its object.
    except (EvenstepError, OSError, RuntimeError, CheckpointException) as error:
        failure = explained(error)
    try:
        with activity.waiting():
            records = gather(engine.workers.processes, {"value": value} if failure is None else {"error": str(failure)})
    except RuntimeError as error:
        raise WorkerLostError(
            f"a checkpoint, which all workers save and restore together, was not finished, and those before it are"
            f" whole: {engine.explained(error)}"
        ) from error
    if failure is not None:
        try:
            raise failure
        finally:
            del failure  # Its traceback holds this frame, and so the script's, which the collector alone would end.
    for rank, record in enumerate(records):
        if "error" in record:
            raise CheckpointError(engine.workers.named(f"worker {rank}: {record['error']}"))
    return [record["value"] for record in records]


def explained(error: BaseException, what: str = "the checkpoint") -> EvenstepError:
    """Return the error to raise after saving or restoring `what` has failed with this one."""
    if isinstance(error, EvenstepError):
        return error
    failures = error.failures if isinstance(error, CheckpointException) else {}
    causes = [f"worker {rank}: {first_line(cause)}" for rank, (cause, _) in sorted(failures.items())]
    said = "; ".join(causes) or first_line(error)
    disk = isinstance(error, OSError | CheckpointException)
    then = "see to it that the folder has room and is there" if disk else "look at the folder and the workers"
    failure = CheckpointError(f"{what} failed ({said}): {then}")
    failure.__cause__ = error
    return failure
