"""Who has fallen silent."""

from typing import final


@final
class Heartbeats:
    """Keeps when each worker was last heard of, in seconds of any clock that does not go back."""

    def __init__(self, limit_seconds: float) -> None:
        self._limit = limit_seconds
        self._heard: dict[int, float] = {}

    def heard(self, worker: int, now: float) -> None:
        """Something came from the worker."""
        self._heard[worker] = now

    def hear_all(self, now: float) -> None:
        """Whoever listens was busy itself: nobody's silence until now means anything."""
        self._heard = dict.fromkeys(self._heard, now)

    def forget(self, worker: int) -> None:
        """The worker is gone; its silence means nothing any more."""
        self._heard.pop(worker, None)

    def silent(self, now: float) -> list[int]:
        """Those who were silent for longer than the limit, ascending."""
        return sorted(worker for worker, heard in self._heard.items() if now - heard > self._limit)
