"""The largest batch that each worker holds, searched for in iterations of ever larger batches, by all workers at once.

Knows neither how memory is measured nor what a sample is: sizes count samples, or average samples where they differ in
cost. What fits is each worker's own estimate (`MemoryModel`), which the reports of an iteration carry.
"""

from dataclasses import dataclass, field
from typing import Final, Self, final

import numpy as np

from evenstep.core.values import IntArray, Reports

_ITERATIONS: Final = 4
"""Of each size: memory and times settle, and a device's times come an iteration late."""
_FARTHEST: Final = 2
_STEP: Final = 32
_PATIENCE_MICROSECONDS: Final = 30_000_000


@final
@dataclass(slots=True, eq=False)
class LargestBatches:
    """Says which sizes to try next, from what all workers report of the last ones; alike on all workers.

    The first sizes are small. Then each worker goes to the size that its memory is predicted to hold, at most twice the
    largest that has run, until there is nothing more to gain: by less than a 32nd, beyond `most`, or in iterations of
    more than 30 s. So the last size is measured, and none is tried that is predicted not to fit.

    Args:
        sizes: The first sizes, int64 of shape [workers].
        most: The largest sizes to try, int64 of shape [workers].

    Attributes:
        holds: The largest size that each worker has computed.
        more: Whether the worker might hold more, which was not tried.
        done: Whether there is nothing more to try.
    """

    sizes: IntArray
    most: IntArray
    holds: IntArray = field(init=False)
    more: list[bool] = field(init=False)
    done: bool = field(init=False, default=False)
    _samples: IntArray = field(init=False)
    _microseconds: IntArray = field(init=False)
    _iterations: int = field(init=False, default=0)

    @classmethod
    def of(cls, smallest: int, most: IntArray) -> Self:
        """From `smallest` samples on each worker."""
        return cls(np.minimum(np.full_like(most, smallest), most), most)

    def __post_init__(self) -> None:
        self.holds, self._samples, self._microseconds = (np.zeros_like(self.sizes) for _ in range(3))
        self.more = [True] * len(self.sizes)

    def observe(self, computed: IntArray, reports: Reports) -> None:
        """Take in one iteration: the sizes that the workers computed, int64 of shape [workers], and their reports."""
        self.holds = np.maximum(self.holds, computed)
        self._time(reports)
        self._iterations += 1
        if self._iterations % _ITERATIONS:
            return
        fits = np.minimum(np.minimum(reports.largest_size, self.most), _FARTHEST * self.holds)
        larger = fits >= self.holds + np.maximum(self.holds // _STEP, 1)
        slow = self._microseconds * fits > _PATIENCE_MICROSECONDS * np.maximum(self._samples, 1)
        grows = larger & ~slow
        self.more = ((larger & slow) | ((self.holds >= self.most) & (reports.largest_size > self.holds))).tolist()
        self.sizes = np.where(grows, fits, self.sizes)
        self.done = not grows.any()

    def _time(self, reports: Reports) -> None:
        """Keep the shortest time of the largest size; without other work it is what the device takes."""
        samples, times = reports.samples, reports.compute_microseconds
        known = (samples > 0) & (times > 0)
        first = known & (samples > self._samples)
        again = known & (samples == self._samples)
        self._microseconds = np.where(
            first, times, np.where(again, np.minimum(times, self._microseconds), self._microseconds)
        )
        self._samples = np.where(first, samples, self._samples)

    @property
    def speeds(self) -> list[float]:
        """Samples per second of compute with the largest batch; 0 if not measured."""
        return [
            1e6 * samples / max(microseconds, 1)
            for samples, microseconds in zip(self._samples.tolist(), self._microseconds.tolist(), strict=True)
        ]

    @property
    def global_batch_size(self) -> int:
        """The largest global batch whose parts, shared out by speed, all workers hold: none waits for another."""
        seconds = [hold / speed for hold, speed in zip(self.holds.tolist(), self.speeds, strict=True) if speed]
        return sum(max(int(min(seconds) * speed), 1) for speed in self.speeds) if seconds else 0
