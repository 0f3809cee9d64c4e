"""How many samples fit into a device's memory, learnt from the peaks of its own iterations.

Knows nothing of how a peak is measured, nor of speed.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from operator import attrgetter
from typing import Final, Self, cast, final

from evenstep.core.errors import ConfigError
from evenstep.core.values import UNLIMITED, State

ROUNDING_BYTES: Final = 24 * 2**20
"""How far an allocator's rounding moves a peak: PyTorch's takes segments of 20 MiB and of multiples of 2 MiB."""

_PPM: Final = 1_000_000
_FARTHEST: Final = 2
_REMEMBERED: Final = 16


@final
class MemoryModel:
    """Models the peak of an iteration as base + slope * samples, and errs on the side of too few samples.

    The slope is a bound: the flattest chord from the largest size measured down to a smaller one, each steepened by
    `rounding_bytes`, or down to `base_bytes` at no samples, so that one size is enough to begin with. The line goes up
    at that slope above every peak measured. What it says fits must leave `margin` of the capacity free and is at most
    twice the largest size that has run, because a device library may choose another algorithm, with another workspace,
    for a larger batch.

    A size that has run fits, whatever the line says, so that a user's own tight sizes are never refused; unless it, or
    a smaller one, ran out of memory. All arithmetic is on integers.

    The papers ask for "enough free memory" and give no model; this one is ours.

    Args:
        capacity_bytes: What the process can have altogether, in bytes.
        base_bytes: What is taken at any size at the least (weights, gradients, optimizer state), in bytes; 0 where
            nothing is known.
        margin: The share of the capacity to leave free, 0 <= margin < 1.
        rounding_bytes: How far the allocator's rounding can move a peak, in bytes.

    Raises:
        ConfigError: A value lies outside its range.
    """

    __slots__ = ("_base_bytes", "_failed", "_margin_ppm", "_peaks", "_rounding_bytes", "_usable_bytes")

    def __init__(
        self,
        *,
        capacity_bytes: int,
        base_bytes: int = 0,
        margin: float = 0.05,
        rounding_bytes: int = ROUNDING_BYTES,
    ) -> None:
        if capacity_bytes < 1:
            raise ConfigError(f"a memory of {capacity_bytes} bytes holds nothing: give a capacity of at least 1")
        if base_bytes < 0 or rounding_bytes < 0:
            raise ConfigError(f"bytes cannot be negative, as in {base_bytes} and {rounding_bytes}: give 0 or more")
        if not 0.0 <= margin < 1.0:
            raise ConfigError(f"a share of {margin} of the memory cannot stay free: use 0 <= margin < 1")
        self._margin_ppm = round(margin * _PPM)
        self._usable_bytes = capacity_bytes - capacity_bytes * self._margin_ppm // _PPM
        self._base_bytes = base_bytes
        self._rounding_bytes = rounding_bytes
        self._peaks: list[_Peak] = []
        self._failed: int | None = None

    def observe(self, samples: int, peak_bytes: int) -> None:
        """Take in one iteration that ran; one of no samples or no bytes tells nothing.

        `peak_bytes` is the most that was allocated during this iteration alone. A peak that contains earlier iterations
        hides how the peak grows with the size, and makes what this predicts unsafe.
        """
        if samples < 1 or peak_bytes < 1:
            return
        at = bisect_left(self._peaks, samples, key=_samples)
        if at < len(self._peaks) and self._peaks[at].samples == samples:
            self._peaks[at] = self._peaks[at].widened(peak_bytes)
            return
        insort(self._peaks, _Peak(samples=samples, least=peak_bytes, most=peak_bytes), key=_samples)
        if len(self._peaks) > _REMEMBERED:
            self._thin()

    def out_of_memory(self, samples: int) -> None:
        """This size did not fit: it, and all within `margin` below it, are ruled out for good."""
        self._failed = samples if self._failed is None else min(samples, self._failed)

    def largest_size(self) -> int:
        """The largest size that fits, in samples; UNLIMITED while nothing is known, 0 where not even 1 does."""
        largest = UNLIMITED if not self._peaks else self._predicted()
        if self._failed is not None:
            below = self._failed - max(-(-self._failed * self._margin_ppm // _PPM), 1)
            ran = max((peak.samples for peak in self._peaks if peak.samples < self._failed), default=0)
            largest = min(largest, max(below, ran))
        return max(largest, 0)

    def state_dict(self) -> State:
        """Everything that `load_state_dict` needs to go on bit for bit; what the constructor was given is not in it."""
        return {"peaks": [asdict(peak) for peak in self._peaks], "failed": self._failed}

    def load_state_dict(self, state: State) -> None:
        """Go on where the given state was taken."""
        self._peaks = [_Peak(**peak) for peak in cast("list[dict[str, int]]", state["peaks"])]
        self._failed = cast("int | None", state["failed"])

    def _predicted(self) -> int:
        """The largest size that the line, raised above every peak, says to fit, within what the data are near."""
        largest_run = self._peaks[-1].samples
        slope = min(self._slopes())
        free = self._usable_bytes - self._rounding_bytes
        fits = min(peak.samples + (free - peak.most) // slope for peak in self._peaks)
        return min(max(fits, largest_run), _FARTHEST * largest_run, UNLIMITED)

    def _slopes(self) -> Iterator[Fraction]:
        """Bytes per sample that the true slope does not exceed, one for each chord; never none."""
        *smaller, top = self._peaks
        base = self._base_bytes if self._base_bytes < top.most else 0
        yield Fraction(top.most - base, top.samples)
        for peak in smaller:
            rise = top.most - peak.least + self._rounding_bytes
            if rise > 0:  # A larger size that took far less memory: something else than the size was at work.
                yield Fraction(rise, top.samples - peak.samples)

    def _thin(self) -> None:
        """Forget the size that stands closest between its neighbours; the smallest and the largest stay."""
        gaps = [after.samples - before.samples for before, after in zip(self._peaks, self._peaks[2:], strict=False)]
        del self._peaks[gaps.index(min(gaps)) + 1]


def size_after_failure(failed: int, largest_run: int) -> int:
    """What to begin with on a device that could not hold `failed` samples: what has run, 0 for none, or half of it.

    What fits beyond that is learnt again.
    """
    return max(largest_run, failed // 2)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Peak:
    """The least and the most bytes that iterations of so many samples took at their peaks."""

    samples: int
    least: int
    most: int

    def widened(self, peak_bytes: int) -> Self:
        return replace(self, least=min(self.least, peak_bytes), most=max(self.most, peak_bytes))


_samples = attrgetter("samples")
