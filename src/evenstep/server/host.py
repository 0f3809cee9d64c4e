"""Supervises a run whose servers are hosted by one of its workers, because that worker may be stopped itself."""

import os
from collections.abc import Mapping
from typing import Final, final

from evenstep.core.supervision import Supervision
from evenstep.launch.supervisor import Supervisor
from evenstep.launch.watch import END_SECONDS, Watch
from evenstep.protocol.messages import Drained

HOST: Final = 0
"""The worker that starts the servers of a run without evenstep's launcher."""


@final
class Host:
    """Reports lost workers in place of the process that hosts this server, and ends that process if it is lost itself.

    A worker that was given up and does not come back would keep its launcher waiting forever. If the host's process
    fails, the launcher ends all workers. If another worker is lost, the host fails when its script has ended.

    Args:
        process: The host's process.
        workers: Number of workers of the run.
        end_seconds: How long the host may take to end.
    """

    def __init__(self, process: int, workers: int, *, end_seconds: float = END_SECONDS) -> None:
        self._supervision = Supervision(workers=workers, kept=False)
        self._watch = Watch(None, self._supervision)
        self._process = process
        self._supervisor = Supervisor(process, process)
        self._end_seconds = end_seconds

    def tell(self, event: Mapping[str, object]) -> None:
        """A worker has joined or left."""
        self._watch.told(event)

    def drained(self) -> Drained:
        """The answer to the host when no worker is left."""
        return Drained(awaits=self._supervision.awaits, lost=bool(self._watch.to_end))

    def look(self) -> None:
        """Check on the host; to be called often."""
        self._watch.look()
        if HOST in self._watch.to_end and os.getppid() == self._process:
            self._supervisor.end(self._end_seconds)
