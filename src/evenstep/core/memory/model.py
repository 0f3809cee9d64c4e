"""The number of samples that fit into a device's memory, learned from the peaks of its iterations.

Independent of how a peak is measured, and of speed.
"""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from operator import attrgetter
from typing import Final, final

from evenstep.core.state import Stateful
from evenstep.core.values import UNLIMITED

ROUNDING_BYTES: Final = 24 * 2**20
"""How far an allocator's rounding moves a peak: PyTorch's uses segments of 20 MiB and of multiples of 2 MiB."""

FARTHEST: Final = 2
"""A size is at most this many times the largest that has run: a device library may choose another algorithm for it."""

_PPM: Final = 1_000_000


@final
@dataclass(slots=True)
class _Peak:
    """The lowest and the highest peak, in bytes, of iterations with this many samples."""

    samples: int
    least: int
    most: int


@final
@dataclass(slots=True, kw_only=True)
class MemoryModel(Stateful):
    """Models the peak of an iteration as base + slope * samples, and errs on the side of too few samples.

    The slope is a bound: the flattest chord from the largest measured size down to a smaller one, each steepened by
    `rounding_bytes`, or down to `base_bytes` at no samples, so that one size is enough to start. The line rises at that
    slope above every measured peak. The predicted size leaves `margin` of the capacity free and is at most twice the
    largest size that has run, because a device library may choose another algorithm, with another workspace, for a
    larger batch.

    Unless it or a smaller one ran out of memory, a size that has run fits, whatever the line says, so that a user's own
    tight sizes are never refused. All arithmetic is on integers.

    The papers ask for "enough free memory" and give no model; this one is ours.

    Args:
        capacity_bytes: The memory that the process can have altogether, in bytes.
        base_bytes: The least memory taken at any size (weights, gradients, optimizer state), in bytes; 0 if unknown.
        margin: The fraction of the capacity to leave free, 0 <= margin < 1.
        rounding_bytes: How far the allocator's rounding can move a peak, in bytes.
        remembered: The number of sizes whose peaks are kept, so that the memory of a long run is bounded.
    """

    capacity_bytes: int
    base_bytes: int = 0
    margin: float = 0.05
    rounding_bytes: int = ROUNDING_BYTES
    remembered: int = 16
    _peaks: list[_Peak] = field(init=False, default_factory=list)
    _failed: int | None = field(init=False, default=None)

    def observe(self, samples: int, peak_bytes: int) -> None:
        """Take in one iteration that ran; one without samples or bytes is ignored.

        `peak_bytes` is the most that was allocated during only this iteration. A peak that includes earlier iterations
        hides how the peak grows with the size, and makes the prediction unsafe.
        """
        if samples < 1 or peak_bytes < 1:
            return
        known = next((peak for peak in self._peaks if peak.samples == samples), None)
        if known is not None:
            known.least, known.most = min(known.least, peak_bytes), max(known.most, peak_bytes)
            return
        insort(self._peaks, _Peak(samples, peak_bytes, peak_bytes), key=attrgetter("samples"))
        if len(self._peaks) > self.remembered:
            # Forget the size with the closest neighbours, but neither the smallest nor the largest.
            gaps = [after.samples - before.samples for before, after in zip(self._peaks, self._peaks[2:], strict=False)]
            del self._peaks[gaps.index(min(gaps)) + 1]

    def out_of_memory(self, samples: int) -> None:
        """This size did not fit: rule out it and all sizes within `margin` below it for good."""
        self._failed = samples if self._failed is None else min(samples, self._failed)

    def largest_size(self) -> int:
        """The largest size that fits, in samples; UNLIMITED if nothing is known, 0 if not even 1 fits."""
        largest = UNLIMITED if not self._peaks else self._predicted()
        if self._failed is not None:
            below = self._failed - max(-(-self._failed * self._margin_ppm // _PPM), 1)
            ran = max((peak.samples for peak in self._peaks if peak.samples < self._failed), default=0)
            largest = min(largest, max(below, ran))
        return max(largest, 0)

    @property
    def _margin_ppm(self) -> int:
        return round(self.margin * _PPM)

    def _predicted(self) -> int:
        """The largest size that fits by the line above every peak and is near the data."""
        largest_run = self._peaks[-1].samples
        slope = min(self._slopes())
        usable = self.capacity_bytes - self.capacity_bytes * self._margin_ppm // _PPM
        free = usable - self.rounding_bytes
        fits = min(peak.samples + (free - peak.most) // slope for peak in self._peaks)
        return min(max(fits, largest_run), FARTHEST * largest_run, UNLIMITED)

    def _slopes(self) -> Iterator[Fraction]:
        """Upper bounds of the true slope in bytes per sample, one for each chord; at least one."""
        *smaller, top = self._peaks
        base = self.base_bytes if self.base_bytes < top.most else 0
        yield Fraction(top.most - base, top.samples)
        for peak in smaller:
            rise = top.most - peak.least + self.rounding_bytes
            if rise > 0:  # Else a larger size took far less memory, for a reason other than the size.
                yield Fraction(rise, top.samples - peak.samples)


def size_after_failure(failed: int, largest_run: int) -> int:
    """The first size after `failed` samples did not fit: the larger of `largest_run` (0 for none) and half of `failed`.

    Larger sizes are learned again.
    """
    return max(largest_run, failed // 2)
