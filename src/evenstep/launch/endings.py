"""How the workers of a run have ended, as their keepers wrote it down."""

import json
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Self, final

from evenstep.launch.keeper import how_it_ended, why_it_failed


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnd:
    """How the process of one worker has ended.

    Attributes:
        exit_code: Negative for a signal's number.
        message: The first line of its error file; empty where it wrote none.
        at_seconds: When, by the clock of its keeper.
        restarts: How often the worker had been started again before.
        again: Its keeper starts it again.
        asked_to_end: The launcher, or a signal to it, asked it to end.
    """

    worker: int
    exit_code: int
    message: str = ""
    at_seconds: float = 0.0
    restarts: int = 0
    again: bool = False
    asked_to_end: bool = False

    @classmethod
    def read(cls, status: Path) -> Self:
        """Read the file of a keeper, named as `evenstep.launch.keeper.status_file` names it."""
        fields = json.loads(status.read_text(encoding="utf-8"))
        number = fields.pop("signal")
        exit_code = fields.pop("exit_code")
        return cls(
            worker=int(status.stem.partition("-")[2]), exit_code=exit_code if number is None else -number, **fields
        )

    @property
    def failed(self) -> bool:
        """Whether it ended by a signal or with another exit code than 0."""
        return self.exit_code != 0

    @property
    def missed_another(self) -> bool:
        """Whether it only ended because another worker had."""
        return "WorkerLostError" in self.message

    @property
    def how(self) -> str:
        """The rest of a sentence that begins with the worker."""
        return how_it_ended(self.exit_code, why_it_failed(self.message))

    def __str__(self) -> str:
        why = why_it_failed(self.message) or "its own output above tells why"
        hint = ", which is what a system out of memory does" if self.exit_code == -signal.SIGKILL else ""
        return f"worker {self.worker} {how_it_ended(self.exit_code, why)}{hint}"


def read_ends(status_dir: Path) -> list[WorkerEnd]:
    """The latest end of each worker that has ended at least once, by rank."""
    ends = [WorkerEnd.read(status) for status in status_dir.glob("worker-*.json")]
    return sorted(ends, key=lambda end: end.worker)
