"""Which workers have kept others waiting for too long."""

from collections.abc import Iterable
from typing import final


@final
class Patience:
    """Keeps since when each worker has been waited for without asking for anything.

    A worker that is silent is a matter of `Heartbeats`. One that is not may still hang in its own script while its
    pulse goes on; that is a fault only where others wait for it. Times are seconds of any clock that does not go back.
    """

    def __init__(self) -> None:
        self._limits: dict[int, float] = {}
        self._since: dict[int, float] = {}

    def joined(self, worker: int, limit_seconds: float) -> None:
        """The worker is here, and may keep others waiting for so long."""
        self._limits[worker] = limit_seconds
        self._since.pop(worker, None)

    def left(self, worker: int) -> None:
        """The worker is gone."""
        self._limits.pop(worker, None)
        self._since.pop(worker, None)

    def asked(self, worker: int) -> None:
        """The worker has asked for something, so it does not hang."""
        self._since.pop(worker, None)

    def start_over(self) -> None:
        """The server itself stood still, so the time until now counts for no worker."""
        self._since.clear()

    def limit_seconds(self, worker: int) -> float:
        """How long this worker, which is here, may keep others waiting."""
        return self._limits[worker]

    def exceeded(self, waited_for: Iterable[int], now: float) -> list[int]:
        """The workers whose limit has passed, given which are waited for now; a worker that is not starts over."""
        self._since = {worker: self._since.get(worker, now) for worker in waited_for if worker in self._limits}
        return [worker for worker, since in self._since.items() if now - since > self._limits[worker]]
