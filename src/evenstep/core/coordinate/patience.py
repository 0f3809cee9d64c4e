"""Which workers have fallen silent, and which have kept others waiting for too long.

Times are seconds of any clock that does not go back.
"""

from collections.abc import Iterable
from typing import final


@final
class Heartbeats:
    """Keeps the time at which each worker was last heard."""

    def __init__(self, limit_seconds: float) -> None:
        self._limit = limit_seconds
        self._heard: dict[int, float] = {}

    def heard(self, worker: int, now: float) -> None:
        """Something came from the worker."""
        self._heard[worker] = now

    def hear_all(self, now: float) -> None:
        """The listener was busy itself, so the silence of workers until now means nothing."""
        self._heard = dict.fromkeys(self._heard, now)

    def forget(self, worker: int) -> None:
        """The worker has left, so its silence means nothing."""
        self._heard.pop(worker, None)

    def silent(self, now: float) -> list[int]:
        """The workers that were silent for longer than the limit, ascending."""
        return sorted(worker for worker, heard in self._heard.items() if now - heard > self._limit)


@final
class Patience:
    """Keeps the time since which each worker has been waited for without asking for anything.

    A worker whose pulse goes on may still hang in its script, which is a fault only if others wait for it.
    """

    def __init__(self) -> None:
        self._limits: dict[int, float] = {}
        self._since: dict[int, float] = {}

    def joined(self, worker: int, limit_seconds: float) -> None:
        """The worker has joined, and may keep others waiting for this long."""
        self._limits[worker] = limit_seconds
        self._since.pop(worker, None)

    def left(self, worker: int) -> None:
        """The worker has left."""
        self._limits.pop(worker, None)
        self._since.pop(worker, None)

    def asked(self, worker: int) -> None:
        """The worker has asked for something, so it does not hang."""
        self._since.pop(worker, None)

    def start_over(self) -> None:
        """The server itself stood still, so the time until now counts for no worker."""
        self._since.clear()

    def limit_seconds(self, worker: int) -> float:
        """How long this worker, which has joined, may keep others waiting."""
        return self._limits[worker]

    def exceeded(self, waited_for: Iterable[int], now: float) -> list[int]:
        """The workers whose limit has passed, given which are waited for now; a worker that is not starts over."""
        self._since = {worker: self._since.get(worker, now) for worker in waited_for if worker in self._limits}
        return [worker for worker, since in self._since.items() if now - since > self._limits[worker]]
