"""Says in one sentence which worker ended a run, and how."""

import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, final

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from evenstep.core.errors import EvenstepError
from evenstep.runtime.keeper import how_it_ended, why_it_failed

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


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFailure:
    """How one worker failed; a negative exit code is a signal's number, `message` the first line of its error file."""

    worker: int
    exit_code: int
    message: str
    at_seconds: float = 0.0

    @classmethod
    def read(cls, status: Path) -> Self:
        """What its keeper wrote down, in a file as `evenstep.runtime.keeper.status_file` names it."""
        fields = json.loads(status.read_text(encoding="utf-8"))
        return cls(
            worker=int(status.stem.partition("-")[2]),
            exit_code=fields["exit_code"] if fields["signal"] is None else -fields["signal"],
            message=fields["message"],
            at_seconds=fields["at_seconds"],
        )

    @property
    def missed_another(self) -> bool:
        """Whether it only ended because another did."""
        return "WorkerLostError" in self.message

    def __str__(self) -> str:
        why = why_it_failed(self.message) or "its own output above tells why"
        hint = ", which is what a system out of memory does" if self.exit_code == -signal.SIGKILL else ""
        return f"worker {self.worker} {how_it_ended(self.exit_code, why)}{hint}"

    def error(self, then: str = "") -> RunFailedError:
        """The failure of the run that this was; `then` ends the sentence."""
        exit_code = 128 - self.exit_code if self.exit_code < 0 else self.exit_code
        return RunFailedError(f"{self}{then}", exit_code=exit_code, worker=self.worker)


def read_failures(status_dir: Path) -> list[WorkerFailure]:
    """The workers whose keepers wrote down that they failed, the first first; who only missed another comes last."""
    failures = [WorkerFailure.read(status) for status in status_dir.glob("worker-*.json")]
    return sorted(failures, key=lambda failure: (failure.missed_another, failure.at_seconds))


def failure_of_all(failures: Sequence[WorkerFailure], servers_lost: str | None) -> RunFailedError:
    """The failure of a run of which no worker is left, `failures` as `read_failures` orders them.

    `servers_lost` is why there were no servers any more, None where there were.
    """
    if servers_lost is not None:
        exit_code = failures[0].error().exit_code
        return RunFailedError(f"{servers_lost}; without servers {failures[0]}", exit_code=exit_code)
    return failures[0].error("; no worker finished" if len(failures) > 1 else "")


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

    worker, first = min(failed.failures.items(), key=order)
    failure = WorkerFailure(worker=worker, exit_code=first.exitcode, message=_message(first))
    return failure.error("; the others were stopped" if failure.exit_code < 0 else "")


def _message(failure: ProcessFailure) -> str:
    """What the worker wrote into its error file: one line, empty where there is none."""
    message = failure.error_file_data.get("message")
    return str(message["message"]).strip().partition("\n")[0] if isinstance(message, dict) else ""
