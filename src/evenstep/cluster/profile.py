"""What follows from a device's times and memory at some batch sizes: which size to measure next, what fits.

Knows neither the device nor how anything is measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, Self, final

from evenstep.cluster.slowness import DeviceMemory

WARMUP: Final = 2
"""Iterations of each size that are not counted: allocators grow, kernels are searched for."""

_FEWEST: Final = WARMUP + 2
_ORDINARY: Final = WARMUP + 7
_MOST: Final = WARMUP + 48
_BRIEF_SECONDS: Final = 0.3
_PATIENCE_SECONDS: Final = 3.0
_KNEE: Final = 0.9
_LEVEL: Final = 1.03
_LEVEL_FOR: Final = 3
_MIN_POINTS: Final = 6
_NOISE: Final = 0.4


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilePoint:
    """One batch size: the fewest seconds of compute of an iteration, and the peak of memory so far, in bytes.

    The fewest, because other programs on the machine only add to them. `spread` is what they added: how much longer an
    iteration took on average, as a part of `seconds`; 0 or more.
    """

    samples: int
    seconds: float
    peak_bytes: int
    spread: float = 0.0

    @classmethod
    def of(cls, samples: int, seconds: Sequence[float], peak_bytes: int) -> Self:
        """Of the seconds of all iterations of this size, including the warm-up."""
        counted = seconds[WARMUP:]
        fewest = min(counted)
        spread = sum(counted) / len(counted) / fewest - 1 if fewest else 0.0
        return cls(samples=samples, seconds=fewest, peak_bytes=peak_bytes, spread=spread)

    @property
    def samples_per_second(self) -> float:
        """The throughput at this size."""
        return self.samples / self.seconds


def enough(seconds: Sequence[float]) -> bool:
    """Whether a size has been measured for long enough.

    >>> enough([0.1] * 8), enough([0.1] * 9), enough([0.001] * 49), enough([0.001] * 50), enough([2.0] * 4)
    (False, True, False, True, True)
    """
    done, total = len(seconds), sum(seconds)
    return (
        done >= _MOST
        or (done >= _ORDINARY and total > _BRIEF_SECONDS)
        or (done >= _FEWEST and total > _PATIENCE_SECONDS)
    )


def next_size(points: Sequence[ProfilePoint], *, smallest: int, largest: int) -> int | None:
    """The size to measure after these, in steps of about 1.5; None beyond `largest`, or if no larger one is needed.

    Larger sizes are not needed once the throughput has not risen by 3 % over the last three.

    >>> next_size([], smallest=1, largest=64)
    1
    >>> sizes = [ProfilePoint(samples=n, seconds=1.0 + n, peak_bytes=0) for n in (1, 2, 3, 4, 6)]
    >>> next_size(sizes[:4], smallest=1, largest=64), next_size(sizes, smallest=1, largest=64)
    (6, 8)
    >>> next_size(sizes, smallest=1, largest=7)
    """
    if not points:
        return smallest if smallest <= largest else None
    size = _following(points[-1].samples)
    return None if size > largest or _levelled(points) else size


def doubt(points: Sequence[ProfilePoint]) -> str | None:
    """Why these times may be wrong, if iterations of one size took too different times; else None.

    The median of the spread over the sizes is 0.1 to 0.3 on an idle machine, and 0.6 to 0.8 where two busy processes
    share its two cores.

    >>> print(doubt([ProfilePoint(samples=n, seconds=1.0, peak_bytes=0, spread=0.2) for n in (1, 2, 3)]))
    None
    """
    typical = median(point.spread for point in points)
    if typical <= _NOISE:
        return None
    return (
        f"iterations of the same batch size took {typical:.0%} longer on average than the shortest of them, where up to"
        f" {_NOISE:.0%} is noise: something else ran on this machine, so profile again when it is idle"
    )


def knee(points: Sequence[ProfilePoint]) -> int:
    """The smallest size whose throughput is at least 90 % of the best: larger batches gain little more.

    >>> knee([ProfilePoint(samples=n, seconds=9.0 + n, peak_bytes=0) for n in (1, 10, 100, 1000)])
    100
    """
    best = max(point.samples_per_second for point in points)
    return next(point.samples for point in points if point.samples_per_second >= _KNEE * best)


def memory_of(points: Sequence[ProfilePoint], capacity_bytes: int) -> DeviceMemory | None:
    """The line through the peaks of the smallest and the largest size, raised above all of them.

    None if memory was not seen to grow with the batch.

    >>> grown = [ProfilePoint(samples=n, seconds=1.0, peak_bytes=10**6 + n * 1000) for n in (1, 4, 16)]
    >>> memory_of(grown, 2 * 10**6).largest_batch
    1000
    """
    first, last = points[0], points[-1]
    rise = last.peak_bytes - first.peak_bytes
    if rise <= 0:
        return None
    slope = -(-rise // (last.samples - first.samples))
    fixed = max(point.peak_bytes - slope * point.samples for point in points)
    return DeviceMemory(capacity_bytes=capacity_bytes, fixed_bytes=max(fixed, 0), bytes_per_sample=slope)


def _levelled(points: Sequence[ProfilePoint]) -> bool:
    if len(points) < _MIN_POINTS:
        return False
    before, after = points[:-_LEVEL_FOR], points[-_LEVEL_FOR:]
    return max(each.samples_per_second for each in after) < _LEVEL * max(each.samples_per_second for each in before)


def _following(size: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, 24, ..."""
    power = 1 << (size.bit_length() - 1)
    halfway = power + power // 2
    return halfway if size < halfway else 2 * power


def profiled_cluster(
    name: str, points: Sequence[ProfilePoint], memory: DeviceMemory | None, *, fit_from: int, count: int, heading: str
) -> str:
    """The text of a cluster file, which `parse_cluster` reads, with `count` workers on one profiled device.

    Args:
        name: The device's name: letters, digits, - and _.
        points: What was measured, in rising order of size.
        memory: Its memory; None if it is not known.
        fit_from: The size from which the time is taken to grow along a line.
        count: The number of workers.
        heading: A line of comment.
    """
    measured = ", ".join(f'[{point.samples}, "{point.seconds * 1e3:.4f} ms"]' for point in points)
    lines = [f"# {heading}", f"[devices.{name}]", f"points = [{measured}]", f"fit_from = {fit_from}"]
    if memory is not None:
        lines += [
            f'memory = "{memory.capacity_bytes / 1e6:.0f} MB"',
            f'memory_fixed = "{memory.fixed_bytes / 1e6:.3f} MB"',
            f'memory_per_sample = "{memory.bytes_per_sample / 1e3:.3f} KB"',
        ]
    return "\n".join([*lines, "", "[[workers]]", f'device = "{name}"', f"count = {count}", ""])
