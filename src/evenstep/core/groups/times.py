"""How long each worker's iterations take, as known so far: what groups are formed by."""

from collections.abc import Collection
from dataclasses import dataclass, field
from math import log
from statistics import median, stdev
from typing import Final, final

from evenstep.core.state import Stateful

_REMEMBERED: Final = 9
"""Iterations of a worker whose median is its time: a few odd ones move no group."""
_MIN_ITERATIONS: Final = 5
"""With fewer iterations nothing is known of the worker."""
_ANOTHER_SIZE: Final = 0.1
"""A relative change of size after which earlier times are forgotten."""
_ERRORS: Final = 4.0
"""Standard errors from the median beyond which a difference is not noise."""
_OF_A_MEDIAN: Final = 1.2533
"""Standard error of a median over that of a mean, for normal times."""


@final
@dataclass(slots=True)
class IterationTimes(Stateful):
    """Times of each worker's latest iterations at its present size."""

    _seconds: dict[int, list[float]] = field(init=False, default_factory=dict)
    _samples: dict[int, int] = field(init=False, default_factory=dict)

    def observe(self, worker: int, seconds: float, samples: int) -> None:
        """Note the time that a worker took for an iteration with this many samples."""
        before = self._samples.get(worker, samples)
        self._samples[worker] = samples
        known = [] if abs(samples - before) > _ANOTHER_SIZE * before else self._seconds.get(worker, [])
        self._seconds[worker] = [*known, seconds][-_REMEMBERED:]

    def estimate(self, here: Collection[int], workers: int) -> list[float] | None:
        """Seconds of an iteration of each worker, by rank; None before they are known for all workers in `here`.

        An absent worker has its last known time, or else the median of the others. A worker that differs from the
        median by no more than noise counts as the median: speeds that are new in every iteration justify no groups.
        """
        known = {worker: seconds for worker, seconds in self._seconds.items() if len(seconds) >= _MIN_ITERATIONS}
        if not known or not known.keys() >= set(here) or min(map(min, known.values())) <= 0.0:
            return None
        times = {worker: median(seconds) for worker, seconds in known.items()}
        middle = median(times.values())
        for worker, seconds in known.items():
            # Of logarithms, because the noise of a slow worker is proportional to its time.
            error = _OF_A_MEDIAN * stdev(map(log, seconds)) / len(seconds) ** 0.5
            if abs(log(times[worker] / middle)) <= _ERRORS * error:
                times[worker] = middle
        return [times.get(worker, middle) for worker in range(workers)]
