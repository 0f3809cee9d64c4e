"""Says in one sentence which worker ended a run, and how."""

import signal
from collections.abc import Mapping, Sequence
from typing import final

from evenstep.core.errors import EvenstepError
from evenstep.launch.endings import WorkerEnd
from evenstep.launch.keeper import signal_name


@final
class RunFailedError(EvenstepError, RuntimeError):
    """A run did not come to its end.

    `exit_code` is what the launcher's process should end with; `worker` is who failed, None where a signal ended it.
    """

    def __init__(self, message: str, *, exit_code: int, worker: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.worker = worker


def failures_in(ends: Sequence[WorkerEnd]) -> list[WorkerEnd]:
    """Those that failed, the cause first: not one that was stopped then, nor one that only missed another."""

    def order(end: WorkerEnd) -> tuple[bool, bool, bool, float]:
        # A worker that loses another may be faster to end; its own end is then an exit or an abort.
        killed = end.exit_code < 0 and end.exit_code != -signal.SIGABRT
        return end.asked_to_end, end.missed_another, not killed, end.at_seconds

    return sorted((end for end in ends if end.failed), key=order)


def failure(end: WorkerEnd, then: str = "") -> RunFailedError:
    """The failure of the run that this worker's was; `then` ends the sentence."""
    return RunFailedError(f"{end}{then}", exit_code=_code(end.exit_code), worker=end.worker)


def failure_to_begin(why: str, ends: Sequence[WorkerEnd]) -> RunFailedError:
    """The failure of a run that was stopped before it began, for this reason."""
    first = next((end for end in failures_in(ends) if not end.asked_to_end), None)
    if first is None:
        return RunFailedError(why, exit_code=1)
    return RunFailedError(why, exit_code=_code(first.exit_code), worker=first.worker)


def failure_of_all(ends: Sequence[WorkerEnd], servers_lost: str | None) -> RunFailedError:
    """The failure of a run on servers of which no worker is left.

    `servers_lost` is why there were no servers any more, None where there were.
    """
    first, *others = failures_in(ends)
    if servers_lost is not None:
        return RunFailedError(f"{servers_lost}; without servers {first}", exit_code=_code(first.exit_code))
    return failure(first, "; no worker finished" if others else "")


def failure_of(ends: Sequence[WorkerEnd], killed_keepers: Mapping[int, int]) -> RunFailedError:
    """The failure of a run that torchrun's agent ended; `killed_keepers` has the signals of keepers, by worker."""
    failures = failures_in(ends)
    first = failures[0] if failures else None
    if killed_keepers and (first is None or first.asked_to_end or first.missed_another):
        worker, number = min(killed_keepers.items())
        how = f"the keeper of worker {worker} was killed by {signal_name(number)}, and the worker with it"
        return RunFailedError(f"{how}; the others were stopped", exit_code=_code(-number), worker=worker)
    if first is None:
        return RunFailedError("a worker ended before it was started", exit_code=1)
    if first.exit_code < 0:
        return failure(first, "; the others were stopped")
    done = [end.worker for end in ends if not end.failed and end.at_seconds < first.at_seconds]
    if first.missed_another and done:
        return failure(first, f"; worker {done[0]} had ended with exit code 0")
    return failure(first)


def _code(exit_code: int) -> int:
    return 128 - exit_code if exit_code < 0 else exit_code
