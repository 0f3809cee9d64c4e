"""How long each worker's iterations take, as far as it is known: what groups are formed by."""

from collections import deque
from collections.abc import Collection, Mapping
from math import log
from statistics import median, stdev
from typing import Final, cast, final

from evenstep.core.values import State

_REMEMBERED: Final = 9
"""Iterations of a worker whose median is its time: a few odd ones move no group."""
_FEWEST: Final = 5
"""Before there are so many, nothing is known of the worker."""
_ANOTHER_SIZE: Final = 0.1
"""A size that differs from the one before by more than this part of it says nothing of what the one before took."""
_ERRORS: Final = 4.0
"""So many standard errors from the middle are a difference, fewer are noise."""
_OF_A_MEDIAN: Final = 1.2533
"""Its standard error over that of a mean, where times are normal."""


@final
class IterationTimes:
    """Times of each worker's latest iterations with the size that it has now."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}
        self._samples: dict[int, int] = {}

    def observe(self, worker: int, seconds: float, samples: int) -> None:
        """A worker has taken so long for an iteration of so many samples."""
        before = self._samples.get(worker, samples)
        self._samples[worker] = samples
        known = self._seconds.setdefault(worker, deque(maxlen=_REMEMBERED))
        if abs(samples - before) > _ANOTHER_SIZE * before:
            known.clear()
        known.append(seconds)

    def estimate(self, here: Collection[int], workers: int) -> list[float] | None:
        """Seconds of an iteration of each of so many workers, by rank; None before they are known of all who are here.

        Of who is not here the last is taken that was known, or the middle of the others. Who differs from the middle
        by no more than noise counts as the middle: speeds that are new in every iteration are no reason for groups.
        """
        known = {worker: seconds for worker, seconds in self._seconds.items() if len(seconds) >= _FEWEST}
        if not known or not all(map(known.__contains__, here)) or min(map(min, known.values())) <= 0.0:
            return None
        times = {worker: median(seconds) for worker, seconds in known.items()}
        middle = median(times.values())
        for worker, seconds in known.items():
            # Of logarithms: what is slow is noisy in proportion.
            error = _OF_A_MEDIAN * stdev(map(log, seconds)) / len(seconds) ** 0.5
            if abs(log(times[worker] / middle)) <= _ERRORS * error:
                times[worker] = middle
        return [times.get(worker, middle) for worker in range(workers)]

    def state_dict(self) -> State:
        """Plain numbers and lists."""
        return {
            "seconds": [[worker, list(seconds)] for worker, seconds in self._seconds.items()],
            "samples": [[worker, samples] for worker, samples in self._samples.items()],
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on from the given state."""
        seconds = cast("list[tuple[int, list[float]]]", state["seconds"])
        self._seconds = {worker: deque(each, maxlen=_REMEMBERED) for worker, each in seconds}
        self._samples = dict(cast("list[tuple[int, int]]", state["samples"]))
