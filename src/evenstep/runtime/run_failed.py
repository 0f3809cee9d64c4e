"""Says in one sentence which worker ended a run, and how."""

import signal
from typing import final

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from evenstep.core.errors import EvenstepError

CLEARING_SECONDS = 5
"""A worker that is killed so long after others reported it missing was killed by the launcher."""


@final
class RunFailedError(EvenstepError, RuntimeError):
    """A run did not come to its end.

    `exit_code` is what the launcher's process should end with; `worker` is who failed, None where a signal ended it.
    """

    def __init__(self, message: str, *, exit_code: int, worker: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.worker = worker


def failure_of(failed: ChildFailedError) -> RunFailedError:
    """The worker that failed first and how; not one that only missed another, or that the launcher stopped then."""
    lost = [failure.timestamp for failure in failed.failures.values() if "WorkerLostError" in _message(failure)]

    def order(item: tuple[int, ProcessFailure]) -> tuple[bool, bool, bool, int]:
        _, failure = item
        # Whoever is killed well after another worker was already missed had stopped, and is only now cleared away.
        cleared = (
            failure.exitcode == -signal.SIGKILL and bool(lost) and failure.timestamp > min(lost) + CLEARING_SECONDS
        )
        stopped = failure.exitcode == -signal.SIGTERM or cleared
        missed = "WorkerLostError" in _message(failure)
        # Deaths within the same tenth of a second are seen at once; a survivor's own end is then an exit or an abort.
        killed = failure.exitcode < 0 and failure.exitcode != -signal.SIGABRT
        return stopped, missed, not killed, failure.timestamp

    worker, failure = min(failed.failures.items(), key=order)
    if failure.exitcode < 0:
        name = failure.signal_name()
        hint = ", which is what a system out of memory does" if name == "SIGKILL" else ""
        text = f"worker {worker} was killed by {name}{hint}; the others were stopped"
        return RunFailedError(text, exit_code=128 - failure.exitcode, worker=worker)
    kind, _, message = _message(failure).partition(": ")
    # An error of Python's is known by its type, one of evenstep's by what it says.
    why = (message if kind.endswith("Error") else _message(failure)) or "its own output above tells why"
    text = f"worker {worker} ended with exit code {failure.exitcode}: {why}"
    return RunFailedError(text, exit_code=failure.exitcode, worker=worker)


def _message(failure: ProcessFailure) -> str:
    """What the worker wrote into its error file: one line, empty where there is none."""
    message = failure.error_file_data.get("message")
    return str(message["message"]).strip().partition("\n")[0] if isinstance(message, dict) else ""
