"""Reports to the parent process which workers join and leave, and which ones missed a pass."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import final

from evenstep.core.coordinate import Coordinator
from evenstep.core.supervision import Why
from evenstep.protocol.encoding import encode
from evenstep.protocol.messages import Drained
from evenstep.transport.base import Connection, ConnectionLostError


@final
class Attendance:
    """Which workers have left, and in which pass.

    Args:
        report: Receives an event when a worker joins, leaves or misses a pass.
        drained: Makes the answer to `Drain`.
    """

    def __init__(self, report: Callable[[Mapping[str, object]], None], drained: Callable[[], Drained]) -> None:
        self._report = report
        self._drained = drained
        self._left_loop: dict[int, int] = {}
        """The pass that each worker has left before its end."""
        self._done: dict[int, int] = {}
        """The last pass of each worker that left after its end."""
        self._draining: list[Connection] = []

    def met(self, worker: int) -> None:
        """The worker waits for the others, before the run begins."""
        self._report({"event": "meet", "worker": worker})

    def joined(self, worker: int, limit_seconds: float) -> None:
        """The worker has joined. It may keep others waiting for `limit_seconds`."""
        self._done.pop(worker, None)
        self._report({"event": "join", "worker": worker, "limit_seconds": limit_seconds})

    def left_loop(self, worker: int, number: int) -> None:
        """The worker has left its loop in the pass of this number."""
        self._left_loop[worker] = number

    def left(self, worker: int, why: Why, coordinator: Coordinator, seconds: float, doing: str) -> bool:
        """The worker has left: it was silent or hung for this many seconds, or `seconds` is 0.

        Returns:
            Whether it left in the middle of a pass.
        """
        number = coordinator.passes.number
        broke_off = self._left_loop.pop(worker, None) == number and not coordinator.claims.over
        in_loop = worker in coordinator.passes or broke_off
        if why in (Why.DONE, Why.ENDED) and not in_loop:
            self._done[worker] = number
        about = {"worker": worker, "why": why, "seconds": seconds, "in_loop": in_loop, "doing": doing}
        self._report({"event": "leave", **about})
        return in_loop

    def report_missing(self, number: int) -> None:
        """Report the workers that left after a pass and did not return for the present one, `number`."""
        for worker in [worker for worker, last in self._done.items() if last < number]:
            del self._done[worker]
            self._report({"event": "missing", "worker": worker})

    def drain(self, connection: Connection) -> None:
        """Answer over this connection when no worker is left."""
        self._draining.append(connection)

    def tell_drained(self) -> None:
        """No worker is left."""
        for connection in self._draining:
            with suppress(ConnectionLostError):
                connection.send(encode(self._drained()), wait=False)
        self._draining.clear()
