"""Steps that all workers take together. If one of them fails, all raise, instead of waiting for it."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from evenstep.core.activity import Doing
from evenstep.core.errors import CheckpointError, EvenstepError, WorkerLostError
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
    activity = engine.balancer.activity
    try:
        with activity.doing(Doing.CHECKPOINTING):
            value = part()
    # RuntimeError: a collective failed with its peer, or a state does not fit its object.
    except (EvenstepError, OSError, RuntimeError, CheckpointException) as error:
        failure = _explained(error)
    try:
        with activity.waiting():
            records = gather(engine.workers, {"value": value} if failure is None else {"error": str(failure)})
    except RuntimeError as error:
        raise WorkerLostError(
            f"a checkpoint, which all workers save and restore together, was not finished, and those before it are"
            f" whole: {engine.explained(error)}"
        ) from error
    if failure is not None:
        raise failure
    for rank, record in enumerate(records):
        if "error" in record:
            raise CheckpointError(f"worker {rank}: {record['error']}")
    return [record["value"] for record in records]


def _explained(error: EvenstepError | OSError | RuntimeError | CheckpointException) -> EvenstepError:
    if isinstance(error, EvenstepError):
        return error
    if isinstance(error, CheckpointException):
        causes = "; ".join(f"worker {rank}: {cause[0]!r}" for rank, cause in error.failures.items())
        text = f"torch.distributed.checkpoint failed ({causes}): look at the folder and its disk"
    elif isinstance(error, OSError):
        text = f"the checkpoint failed ({error}): see to it that the folder has room and is there"
    else:
        text = f"the checkpoint failed ({str(error).strip()}): look at the folder and the workers"
    failure = CheckpointError(text)
    failure.__cause__ = error
    return failure


@contextmanager
def collectives(engine: Engine) -> Iterator[None]:
    """Run collectives of torch.distributed.checkpoint, in which this worker mostly waits for the others."""
    with engine.balancer.activity.waiting(), warnings.catch_warnings():
        # A single process needs no process group, but torch warns.
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield
