"""When there is something to tell of a worker's slowness: it begins, changes or ends."""

from typing import Final, final

from evenstep.cluster.slowness.base import Disturbance
from evenstep.cluster.slowness.slowness import NO_SLOWNESS, Slowness

_LASTS: Final = 3
"""Slowness that is over before so many iterations are is jitter, of which nothing is told."""


@final
class SlownessNews:
    """Asked in each iteration of one worker; remembers what was told last, at first that there is no slowness."""

    def __init__(self, disturbance: Disturbance, worker: int) -> None:
        self._disturbance = disturbance
        self._worker = worker
        self._told = NO_SLOWNESS

    def of(self, iteration: int) -> Slowness | None:
        """The slowness from this iteration on, where it is another than was told last, and lasts; else None."""
        now = self._at(iteration)
        if now.is_like(self._told):
            return None
        if not all(self._at(later).is_like(now) for later in range(iteration + 1, iteration + _LASTS)):
            return None
        self._told = now
        return now

    def _at(self, iteration: int) -> Slowness:
        return self._disturbance.slowness(NO_SLOWNESS, worker=self._worker, iteration=iteration)
