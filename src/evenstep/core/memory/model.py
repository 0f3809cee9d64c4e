"""How many samples fit into a device's memory, learned from the peaks of its iterations.

Knows neither how a peak is measured nor anything of speed.
"""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from operator import attrgetter
from typing import Final, final

from evenstep.core.errors import ConfigError
from evenstep.core.state import Stateful
from evenstep.core.values import UNLIMITED

ROUNDING_BYTES: Final = 24 * 2**20
"""How far an allocator's rounding moves a peak: PyTorch's takes segments of 20 MiB and of multiples of 2 MiB."""

_PPM: Final = 1_000_000
_FARTHEST: Final = 2
_REMEMBERED: Final = 16


@final
@dataclass(slots=True)
class _Peak:
    """The least and the most bytes that iterations of this many samples took at their peaks."""

    samples: int
    least: int
    most: int


@final
@dataclass(slots=True, kw_only=True)
class MemoryModel(Stateful):
    """Models the peak of an iteration as base + slope * samples, and errs on the side of too few samples.

    The slope is a bound: the flattest chord from the largest measured size down to a smaller one, each steepened by
    `rounding_bytes`, or down to `base_bytes` at no samples, so that one size is enough for a start. The line goes up at
    that slope above every measured peak. The predicted size leaves `margin` of the capacity free and is at most twice
    the largest size that has run, because a device library may choose another algorithm, with another workspace, for a
    larger batch.

    A size that has run fits, whatever the line says, so that a user's own tight sizes are never refused, unless it or a
    smaller one ran out of memory. All arithmetic is on integers.

    The papers ask for "enough free memory" and give no model; this one is ours.

    Args:
        capacity_bytes: What the process can have altogether, in bytes.
        base_bytes: What is taken at any size at least (weights, gradients, optimizer state), in bytes; 0 if nothing is
            known.
        margin: The share of the capacity to leave free, 0 <= margin < 1.
        rounding_bytes: How far the allocator's rounding can move a peak, in bytes.

    Raises:
        ConfigError: A value is out of range.
    """

    capacity_bytes: int
    base_bytes: int = 0
    margin: float = 0.05
    rounding_bytes: int = ROUNDING_BYTES
    _peaks: list[_Peak] = field(init=False, default_factory=list)
    _failed: int | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.capacity_bytes < 1:
            raise ConfigError(f"a memory of {self.capacity_bytes} bytes holds nothing: give a capacity of at least 1")
        if self.base_bytes < 0 or self.rounding_bytes < 0:
            raise ConfigError(
                f"bytes cannot be negative, as in {self.base_bytes} and {self.rounding_bytes}: give 0 or more"
            )
        if not 0.0 <= self.margin < 1.0:
            raise ConfigError(f"a share of {self.margin} of the memory cannot stay free: use 0 <= margin < 1")

    def observe(self, samples: int, peak_bytes: int) -> None:
        """Take in one iteration that ran; no samples or no bytes tell nothing.

        `peak_bytes` is the most that was allocated during this iteration alone. A peak that contains earlier iterations
        hides how the peak grows with the size, and makes the prediction unsafe.
        """
        if samples < 1 or peak_bytes < 1:
            return
        known = next((peak for peak in self._peaks if peak.samples == samples), None)
        if known is not None:
            known.least, known.most = min(known.least, peak_bytes), max(known.most, peak_bytes)
            return
        insort(self._peaks, _Peak(samples, peak_bytes, peak_bytes), key=attrgetter("samples"))
        if len(self._peaks) > _REMEMBERED:
            self._thin()

    def out_of_memory(self, samples: int) -> None:
        """This size did not fit: it, and all within `margin` below it, are ruled out for good."""
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
        """The largest size that fits by the line above every peak, and that is near to the data."""
        largest_run = self._peaks[-1].samples
        slope = min(self._slopes())
        usable = self.capacity_bytes - self.capacity_bytes * self._margin_ppm // _PPM
        free = usable - self.rounding_bytes
        fits = min(peak.samples + (free - peak.most) // slope for peak in self._peaks)
        return min(max(fits, largest_run), _FARTHEST * largest_run, UNLIMITED)

    def _slopes(self) -> Iterator[Fraction]:
        """Bytes per sample that the true slope does not exceed, one for each chord; at least one."""
        *smaller, top = self._peaks
        base = self.base_bytes if self.base_bytes < top.most else 0
        yield Fraction(top.most - base, top.samples)
        for peak in smaller:
            rise = top.most - peak.least + self.rounding_bytes
            if rise > 0:  # Else a larger size took far less memory: something else than the size was at work.
                yield Fraction(rise, top.samples - peak.samples)

    def _thin(self) -> None:
        """Forget the size that is closest between its neighbours; keep the smallest and the largest."""
        gaps = [after.samples - before.samples for before, after in zip(self._peaks, self._peaks[2:], strict=False)]
        del self._peaks[gaps.index(min(gaps)) + 1]


def size_after_failure(failed: int, largest_run: int) -> int:
    """The first size on a device that could not hold `failed` samples: what has run (0 for none), or half of `failed`.

    What fits beyond that is learned again.
    """
    return max(largest_run, failed // 2)
