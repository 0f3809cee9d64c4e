"""A worker's pulse, which shows the servers that the process is alive and what its main thread does."""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, final

from evenstep.protocol.messages import Ping
from evenstep.transport.base import ConnectionLostError
from evenstep.worker.activity import Activity
from evenstep.worker.servers.remote_shard import RemoteShard

POLL_SECONDS: Final = 0.2
"""How often the pulse checks whether it has to end."""


@final
class Pulse:
    """Sends a `Ping` to every shard in each period, in a thread, until `closed` is set or the main thread ends.

    If the main thread has ended without an error, `close` is called, since a script has no place where it would close
    what `prepare` opened. After an error the worker counts as lost, not as done.
    """

    def __init__(
        self,
        shards: Sequence[RemoteShard],
        activity: Activity,
        seconds: Callable[[], float],
        closed: threading.Event,
        close: Callable[[], None],
    ) -> None:
        self._shards = shards
        self._activity = activity
        self._seconds = seconds
        self._closed = closed
        self._close = close
        self._main = threading.main_thread()
        self.thread = threading.Thread(target=self._beat, name="evenstep-pulse")

    def _beats(self) -> bool:
        return self._main.is_alive() and not self._closed.is_set()

    def _beat(self) -> None:
        while self._beats():
            for shard in self._shards:
                with suppress(ConnectionLostError):  # The main thread handles it.
                    self._ping(shard)
            until = time.monotonic() + self._seconds()
            while self._beats() and (left := until - time.monotonic()) > 0:
                # Joining the main thread is a sleep that ends early when the script does.
                self._main.join(min(left, POLL_SECONDS))
        if not self._closed.is_set() and getattr(sys, "last_value", None) is None:
            self._close()

    def _ping(self, shard: RemoteShard) -> None:
        if shard.connection is not None:
            seen = self._activity.read()
            shard.send(Ping(doing=seen.doing, iteration=seen.iteration, seconds=seen.seconds))
