"""Measured times of each worker's iterations, by which groups are formed."""

from collections.abc import Collection
from dataclasses import dataclass, field
from math import log
from statistics import median, stdev
from typing import Final, final

from evenstep.core.state import Stateful

_OF_A_MEDIAN: Final = 1.2533
"""Standard error of a median over that of a mean, for normal times."""


@final
@dataclass(slots=True, kw_only=True)
class IterationTimes(Stateful):
    """Times of each worker's latest iterations at its present size.

    Args:
        remembered: A worker's time is the median of this many iterations, so a few odd ones do not change its group.
        needed: With fewer iterations the worker's time counts as unknown.
        resized: The relative change of size after which earlier times are forgotten.
        sure: Standard errors from the median beyond which a difference is not noise.
    """

    remembered: int = 9
    needed: int = 5
    resized: float = 0.1
    sure: float = 4.0
    _seconds: dict[int, list[float]] = field(init=False, default_factory=dict)
    _samples: dict[int, int] = field(init=False, default_factory=dict)

    def observe(self, worker: int, seconds: float, samples: int) -> None:
        """Record a worker's time for an iteration with this many samples."""
        before = self._samples.get(worker, samples)
        self._samples[worker] = samples
        known = [] if abs(samples - before) > self.resized * before else self._seconds.get(worker, [])
        self._seconds[worker] = [*known, seconds][-self.remembered :]

    def estimate(self, here: Collection[int], workers: int) -> list[float] | None:
        """Seconds per iteration of each worker, by rank; None until they are known for all workers in `here`.

        An absent worker has its last known time, or else the median of the others. A worker that differs from the
        median by no more than noise counts as the median: speeds that change in every iteration justify no groups.
        """
        known = {worker: seconds for worker, seconds in self._seconds.items() if len(seconds) >= self.needed}
        if not known or not known.keys() >= set(here) or min(map(min, known.values())) <= 0.0:
            return None
        times = {worker: median(seconds) for worker, seconds in known.items()}
        middle = median(times.values())
        for worker, seconds in known.items():
            # The error of logarithms, because the noise of a slow worker is proportional to its time.
            error = _OF_A_MEDIAN * stdev(map(log, seconds)) / len(seconds) ** 0.5
            if abs(log(times[worker] / middle)) <= self.sure * error:
                times[worker] = middle
        return [times.get(worker, middle) for worker in range(workers)]
