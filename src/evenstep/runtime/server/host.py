"""Supervises a run whose servers one of its workers has started: that worker, their host, may be stopped itself."""

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import final

from evenstep.core.supervision import Supervision
from evenstep.runtime.watch import END_SECONDS, FollowsServers, Watch


@final
class Host:
    """Says who is lost, in place of the process that hosts this server, and ends that process where nothing else helps.

    A worker that was given up and does not come back would keep its launcher waiting for ever. When the host's process
    has failed, the launcher ends all others.

    Args:
        process: The host's.
        workers: How many workers the run has.
    """

    def __init__(self, process: int, workers: int) -> None:
        self._supervision = Supervision(workers=workers, kept=False)
        self._watch = Watch(None, FollowsServers(self._supervision))
        self._process = process
        self._asked: float | None = None

    def tell(self, event: Mapping[str, object]) -> None:
        """A worker has come or gone."""
        self._watch.told(event)

    def awaits(self) -> bool:
        """Whether a worker that was given up may still come back."""
        return self._supervision.awaits

    def look(self) -> None:
        """Time has passed."""
        self._watch.look()
        if not self._watch.to_end or os.getppid() != self._process:
            return
        with suppress(ProcessLookupError):
            if self._asked is None:
                self._asked = time.monotonic()
                os.kill(self._process, signal.SIGTERM)
            elif time.monotonic() - self._asked > END_SECONDS:
                os.kill(self._process, signal.SIGKILL)
