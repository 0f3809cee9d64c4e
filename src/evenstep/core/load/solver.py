"""The sizes that finish earliest: minimises the largest predicted time, in exact integers."""

from dataclasses import dataclass
from typing import Final, Protocol, final

import numpy as np

from evenstep.core.load.shares import Bounds, shares
from evenstep.core.values import IntArray

_HALVE_EVERY: Final = 4


class TimeModels(Protocol):
    """Time as a function of batch size for all workers, monotone in the size: int64 arrays of shape [workers]."""

    def nanoseconds(self, sizes: IntArray) -> IntArray:
        """How long each worker takes for its size."""

    def largest(self, nanoseconds: int) -> IntArray:
        """The largest size that each worker finishes within the given time; negative if it finishes none."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lines:
    """t = fixed + per_sample * max(x, flat) nanoseconds: the piecewise-linear relation of LB-BSP's first version.

    (arXiv 1806.02508 v1.) Up to `flat` samples the device is not full, and more samples cost nothing. The paper's limit
    by memory is the problem's `maximum` here. All are int64 of shape [workers], with per_sample >= 1.
    """

    per_sample: IntArray
    fixed: IntArray
    flat: IntArray

    @property
    def proportional(self) -> bool:
        """Whether every worker's time is in proportion to its size: LB-BSP's model of CPU clusters."""
        return not self.fixed.any() and not self.flat.any()

    def nanoseconds(self, sizes: IntArray) -> IntArray:
        return self.fixed + self.per_sample * np.maximum(sizes, self.flat)

    def largest(self, nanoseconds: int) -> IntArray:
        sizes = (nanoseconds - self.fixed) // self.per_sample
        return np.where(sizes >= self.flat, sizes, -1)


def solve(times: TimeModels, bounds: Bounds) -> IntArray:
    """Sizes with the smallest possible largest predicted time (LB-BSP's problem for GPU clusters).

    Searches the least T, in nanoseconds, within which the workers' largest sizes sum to the batch or more. The first
    guess takes each model for a straight line. If the sizes of a guess are k too many, T is at least the k+1-th latest
    of the times at which the workers then end. If they are k too few, T is at most the k-th earliest of the times at
    which the workers would end with one more each. That bound is the next guess, and usually T itself. If there is no
    such bound, the bracket is interpolated, and now and then halved, so that no model takes many guesses.

    Workers that would need exactly T for their next samples share what is then left, in proportion to their sizes. The
    papers give no solver; this one is ours.

    Args:
        times: Monotone time models of all workers.
        bounds: What the sizes must satisfy.

    Returns:
        The sizes in samples, int64 of shape [workers]; they sum to the global batch.
    """
    if int(bounds.lower.sum()) == bounds.units:
        return bounds.lower * bounds.multiple
    search = _Search(times, bounds)
    least, sizes = search.least_time()
    if int(sizes.sum()) > bounds.units:
        sizes = shares(bounds.units, sizes, lower=search.within(least - 1), upper=sizes)
    return sizes * bounds.multiple


def reachable(times: TimeModels, bounds: Bounds, nanoseconds: int) -> bool:
    """Whether some sizes within the bounds all finish within the given time; much cheaper than `solve`."""
    search = _Search(times, bounds)
    enough = int(search.within(nanoseconds).sum()) >= bounds.units
    return enough and int(search.ends(bounds.lower).max()) <= nanoseconds


@final
@dataclass(frozen=True, slots=True)
class _Search:
    """The time models and limits of one problem; sizes are counted in multiples."""

    times: TimeModels
    bounds: Bounds

    def ends(self, sizes: IntArray) -> IntArray:
        return self.times.nanoseconds(sizes * self.bounds.multiple)

    def within(self, nanoseconds: int) -> IntArray:
        """The largest sizes that finish within the time, clipped to the limits."""
        largest = self.times.largest(nanoseconds) // self.bounds.multiple
        return np.minimum(np.maximum(largest, self.bounds.lower), self.bounds.upper)

    def least_time(self) -> tuple[int, IntArray]:
        """T, and the largest sizes within it; the lower limits must leave something to share out."""
        units, lower, upper = self.bounds.units, self.bounds.lower, self.bounds.upper
        # T is more than `low`, where the sizes lack `missing`, and at most `high`, where `surplus` are too many.
        low, missing = -1, units - int(lower.sum())
        high, surplus = None, 0
        guess = self._on_straight_lines()
        guesses = 0
        while True:
            guesses += 1
            sizes = self.within(guess)
            over = int(sizes.sum()) - units
            if over >= 0 and guess == low + 1:
                return guess, sizes
            bound = None
            if over >= 0:
                ends = np.sort(self.ends(sizes)[sizes > lower])
                high, surplus = int(ends[-1]), over
                if over < len(ends) and ends[-1 - over] > low + 1:
                    bound = int(ends[-1 - over])
                    low = bound - 1
                if high == low + 1:
                    return high, sizes
            else:
                ends = np.sort(self.ends(sizes + 1)[sizes < upper])
                low, missing = int(ends[0]) - 1, -over
                if missing <= len(ends) and (high is None or ends[missing - 1] < high):
                    high = bound = int(ends[missing - 1])
            if high is None:
                guess = 2 * guess + 1
            elif guesses % _HALVE_EVERY == 0:
                guess = (low + 1 + high) // 2
            elif bound is None:
                guess = low + max((high - low) * missing // (missing + surplus), 1)
            else:
                guess = bound

    def _on_straight_lines(self) -> int:
        """When all end, if each model were the line through an equal share and twice that, and sizes had no limits."""
        workers, units = len(self.bounds.lower), self.bounds.units
        share = max(units // workers, 1)
        sizes = np.full(workers, share)
        ends = self.ends(sizes)
        speeds = share / np.maximum(self.ends(sizes + sizes) - ends, 1)
        return max(int((units - share * workers + float(speeds @ ends)) / float(speeds.sum())), 0)
