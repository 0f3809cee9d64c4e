"""Supervises a run whose servers are hosted by one of its workers, because that worker may be stopped itself."""

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, final

from evenstep.core.supervision import Supervision
from evenstep.launch.watch import END_SECONDS, FollowsServers, Watch
from evenstep.transport.base import Header

HOST: Final = 0
"""The worker that starts the servers of a run that no launcher of ours has started."""


@final
class Host:
    """Reports lost workers in place of the process that hosts this server, and ends that process if it is lost itself.

    A worker that was given up and does not come back would keep its launcher waiting for ever. When the host's process
    fails, the launcher ends all workers. If another worker is lost, the host fails by itself when its script has ended.

    Args:
        process: The host's.
        workers: How many workers the run has.
        end_seconds: How long the host may take to end.
    """

    def __init__(self, process: int, workers: int, *, end_seconds: float = END_SECONDS) -> None:
        self._supervision = Supervision(workers=workers, kept=False)
        self._watch = Watch(None, FollowsServers(self._supervision))
        self._process = process
        self._end_seconds = end_seconds
        self._asked: float | None = None

    def tell(self, event: Mapping[str, object]) -> None:
        """A worker has come or gone."""
        self._watch.told(event)

    def drained(self) -> Header:
        """What the host hears when no worker is left: whether one may still come back, and whether one is lost."""
        return {"awaits": self._supervision.awaits, "lost": bool(self._watch.to_end)}

    def look(self) -> None:
        """Time has passed."""
        self._watch.look()
        if HOST not in self._watch.to_end or os.getppid() != self._process:
            return
        with suppress(ProcessLookupError):
            if self._asked is None:
                self._asked = time.monotonic()
                os.kill(self._process, signal.SIGTERM)
            elif time.monotonic() - self._asked > self._end_seconds:
                os.kill(self._process, signal.SIGKILL)
