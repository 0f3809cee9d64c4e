"""Says in one sentence which worker ended a run, and how."""

import signal
from collections.abc import Mapping, Sequence
from typing import final

from evenstep.core.ending import Ending, failures_in, signal_name
from evenstep.core.errors import EvenstepError


@final
class RunFailedError(EvenstepError, RuntimeError):
    """A run did not finish.

    `exit_code` is negative for a signal, and becomes what the launcher's process should exit with; `worker` is the
    one that failed, None if a signal ended the run.
    """

    def __init__(self, message: str, *, exit_code: int, worker: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = 128 - exit_code if exit_code < 0 else exit_code
        self.worker = worker


def failure_to_begin(why: str, ends: Sequence[Ending]) -> RunFailedError:
    """Return the failure of a run that was stopped before it began, for this reason."""
    for end in failures_in(ends):
        if not end.asked_to_end:
            return RunFailedError(why, exit_code=end.exit_code, worker=end.worker)
    return RunFailedError(why, exit_code=1)


def failure_of_all(ends: Sequence[Ending], servers_lost: str | None) -> RunFailedError:
    """Return the failure of a run on servers that lost all workers; `servers_lost`: why the servers are gone, if so."""
    first, *others = failures_in(ends)
    if servers_lost is not None:
        return RunFailedError(f"{servers_lost}; without servers {first}", exit_code=first.exit_code)
    return _failure(first, "; no worker finished" if others else "")


def failure_of(ends: Sequence[Ending], killed_keepers: Mapping[int, int]) -> RunFailedError:
    """Return the failure of a run that torchrun's agent ended; `killed_keepers` has their signals, by worker."""
    failures = failures_in(ends)
    first = failures[0] if failures else None
    if killed_keepers and (first is None or first.asked_to_end or first.missed_another):
        worker, number = min(killed_keepers.items())
        how = f"the keeper of worker {worker} was killed by {signal_name(number)}, and the worker with it"
        return RunFailedError(f"{how}; the others were stopped", exit_code=-number, worker=worker)
    if first is None:
        return RunFailedError("a worker ended before it was started", exit_code=1)
    done = [end.worker for end in ends if not end.failed and end.at_seconds < first.at_seconds]
    # A framework may abort a worker that misses another.
    if done and (first.missed_another or first.exit_code == -signal.SIGABRT):
        return _failure(first, f"; worker {done[0]} had ended with exit code 0")
    return _failure(first, "; the others were stopped" if first.exit_code < 0 else "")


def _failure(end: Ending, then: str) -> RunFailedError:
    return RunFailedError(f"{end}{then}", exit_code=end.exit_code, worker=end.worker)
