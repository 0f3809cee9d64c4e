"""Steps that all workers take together: where one of them fails, all raise alike instead of waiting for it."""

from collections.abc import Callable
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from evenstep.core.activity import Doing
from evenstep.core.errors import CheckpointError, EvenstepError, WorkerLostError
from evenstep.torch.engines.engine import Engine
from evenstep.torch.processes.workers import gather


def together(engine: Engine, part: Callable[[], Any]) -> list[Any]:
    """Do this worker's part, and return what everybody's came to, as JSON has it, worker 0's first.

    Raises:
        EvenstepError: A part failed, on this worker or on another, which is named.
        WorkerLostError: Another worker is gone, or did not take part; it is named.
    """
    failure: EvenstepError | None = None
    value = None
    activity = engine.balancer.activity
    try:
        with activity.doing(Doing.CHECKPOINTING):
            value = part()
    except EvenstepError as error:
        failure = error
    except OSError as error:
        failure = CheckpointError(f"the checkpoint failed ({error}): see to it that the folder has room and is there")
        failure.__cause__ = error
    except RuntimeError as error:  # A collective failed with its peer, or the state does not fit its object.
        failure = CheckpointError(f"the checkpoint failed ({str(error).strip()}): look at the folder and the workers")
        failure.__cause__ = error
    except CheckpointException as error:
        causes = "; ".join(f"worker {rank}: {cause[0]}" for rank, cause in error.failures.items())
        failure = CheckpointError(f"torch.distributed.checkpoint failed ({causes}): look at the folder and its disk")
        failure.__cause__ = error
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
