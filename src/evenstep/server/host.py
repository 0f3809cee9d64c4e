"""Supervises a run whose servers are hosted by one of its workers, because that worker may be stopped itself."""

import os
import time
from collections.abc import Mapping
from typing import Final, final

from evenstep.core.supervision import Supervision
from evenstep.launch.supervisor import END_SECONDS, Supervisor
from evenstep.telemetry.say import say

HOST: Final = 0
"""The worker that starts the servers of a run without evenstep's launcher."""


@final
class HostProcess:
    """Reports lost workers in place of the process that hosts this server, and ends that process if it is lost itself.

    One call at a time.

    A worker that was given up and does not come back would keep its launcher waiting forever. If the host's process
    fails, the launcher ends all workers. If another worker is lost, the host fails when its script has ended.

    Args:
        process: The host's process.
        workers: Number of workers of the run.
        end_seconds: How long the host may take to end.
    """

    def __init__(self, process: int, workers: int, *, end_seconds: float = END_SECONDS) -> None:
        self._supervision = Supervision(workers=workers, kept=False)
        self._process = process
        self._supervisor = Supervisor(process, process)
        self._end_seconds = end_seconds

    def tell(self, event: Mapping[str, object]) -> None:
        """Take in that a worker has joined or left. A later `look` acts on it."""
        self._supervision.told(event)

    @property
    def absent(self) -> dict[str, object]:
        """Tell whether a worker that was given up may come back (`awaits`), and whether one will not (`lost`)."""
        return {"awaits": self._supervision.awaits, "lost": bool(self._supervision.to_end)}

    def look(self) -> None:
        """Report what is due, and check on the host. Call it often."""
        for text in self._supervision.look(time.monotonic()):
            say(text)
        if HOST in self._supervision.to_end and os.getppid() == self._process:
            self._supervisor.end(self._end_seconds)
