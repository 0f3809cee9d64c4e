"""Searches for the largest batch that each worker holds, on all workers at once, with ever larger batches.

Independent of how memory is measured and of what a sample is: sizes count samples, or average samples if they differ in
cost. What fits is each worker's own estimate (`MemoryModel`), which the reports of an iteration carry.
"""

from dataclasses import dataclass, field
from typing import final

import numpy as np

from evenstep.core.memory.model import FARTHEST
from evenstep.core.values import IntArray, Reports


@final
@dataclass(slots=True, eq=False)
class LargestBatches:
    """Decides which sizes to try next from all workers' reports about the last ones, alike on all workers.

    The first sizes are small. Then each worker goes to the size that its memory is predicted to hold, at most twice the
    largest that has run. The search ends when the next size would be less than a 32nd larger, beyond `most`, or take
    more than 30 s per iteration. So the last size is measured, and no size is tried that is predicted not to fit.

    Args:
        smallest: The first size of each worker, in samples.
        most: The largest sizes to try, int64 of shape [workers].
        iterations: Iterations at each size: memory and times settle, and a device's times come an iteration late.
        step: A next size that is larger by less than 1 / step is not worth trying.
        patience_seconds: The longest iteration that is tried.

    Attributes:
        sizes: The sizes to try next, int64 of shape [workers].
        holds: The largest size that each worker has computed.
        more: For each worker, whether it might hold more than was tried.
        done: Whether there is nothing more to try.
    """

    smallest: int
    most: IntArray
    iterations: int = 4
    step: int = 32
    patience_seconds: float = 30.0
    sizes: IntArray = field(init=False)
    holds: IntArray = field(init=False)
    more: list[bool] = field(init=False)
    done: bool = field(init=False, default=False)
    _times: list[dict[int, int]] = field(init=False)
    _seen: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.sizes = np.minimum(np.full_like(self.most, self.smallest), self.most)
        self.holds = np.zeros_like(self.sizes)
        self.more = [True] * len(self.sizes)
        self._times = [{} for _ in self.sizes]

    def observe(self, computed: IntArray, reports: Reports) -> None:
        """Take in one iteration: the sizes that the workers computed, int64 of shape [workers], and their reports."""
        self.holds = np.maximum(self.holds, computed)
        # The shortest time of each size counts: other work only adds to the device's time.
        pairs = zip(reports.samples.tolist(), reports.compute_microseconds.tolist(), strict=True)
        for times, (samples, took) in zip(self._times, pairs, strict=True):
            if samples > 0 and took > 0:
                times[samples] = min(took, times.get(samples, took))
        self._seen += 1
        if self._seen % self.iterations:
            return
        fits = np.minimum(np.minimum(reports.largest_size, self.most), FARTHEST * self.holds)
        larger = fits >= self.holds + np.maximum(self.holds // self.step, 1)
        slow = [
            bool(speed) and size > self.patience_seconds * speed for size, speed in zip(fits, self.speeds, strict=True)
        ]
        grows = larger & ~np.array(slow)
        self.more = ((larger & slow) | ((self.holds >= self.most) & (reports.largest_size > self.holds))).tolist()
        self.sizes = np.where(grows, fits, self.sizes)
        self.done = not grows.any()

    @property
    def points(self) -> list[list[tuple[int, float]]]:
        """For each worker, pairs of size and compute seconds, ascending in both; empty if not measured.

        A time is the shortest at this size or a larger one, because other work only adds to it.
        """
        points: list[list[tuple[int, float]]] = []
        for times in self._times:
            sizes = sorted(times)
            least = np.minimum.accumulate([times[size] for size in reversed(sizes)])[::-1]
            points.append([(size, took / 1e6) for size, took in zip(sizes, least.tolist(), strict=True)])
        return points

    @property
    def speeds(self) -> list[float]:
        """Samples per second of compute with the largest batch; 0 if not measured."""
        return [max(times) * 1e6 / times[max(times)] if times else 0.0 for times in self._times]

    def shared(self, global_batch_size: int) -> IntArray:
        """Sizes in proportion to speed, limited to what each worker holds; int64 of shape [workers]."""
        speeds = self.speeds if all(self.speeds) else [1.0] * len(self.sizes)
        part = global_batch_size / sum(speeds)
        sizes = np.array([round(part * speed) for speed in speeds], dtype=np.int64)
        return np.minimum(np.maximum(sizes, 1), self.holds)

    @property
    def global_batch_size(self) -> int:
        """The largest global batch that all workers hold if divided by speed, so that none waits for another."""
        seconds = [hold / speed for hold, speed in zip(self.holds.tolist(), self.speeds, strict=True) if speed]
        return sum(max(int(min(seconds) * speed), 1) for speed in self.speeds) if seconds else 0
