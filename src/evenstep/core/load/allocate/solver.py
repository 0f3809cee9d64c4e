"""The sizes that finish earliest: minimises the largest predicted time, in exact integers."""

from typing import Final

import numpy as np

from evenstep.core.load.allocate.bounds import Bounds
from evenstep.core.load.allocate.shares import shares
from evenstep.core.load.times.base import TimeModels
from evenstep.core.load.times.in_multiples import InMultiples
from evenstep.core.values import IntArray

_HALVE_EVERY: Final = 4


def solve(times: TimeModels, bounds: Bounds) -> IntArray:
    """Sizes with the smallest possible largest predicted time (LB-BSP, the problem of its section on GPU clusters).

    Looks for the least T, in nanoseconds, within which the workers' largest sizes sum to the batch or more. The first
    guess takes each model for a straight line. A guess whose sizes are k too many shows that T is at least the k+1-th
    latest of the times at which the workers then end, and one whose sizes are k too few that T is at most the k-th
    earliest of the times at which they would end with one more each. That bound is the next guess, and mostly T itself.
    Where there is none the bracket is interpolated, and now and then halved, so that no model takes many guesses.

    Workers that would need exactly T for their next samples share what is then left, in proportion to their sizes. The
    papers give no solver; this one is ours.

    Args:
        times: monotone time models of all workers.
        bounds: what the sizes must satisfy.

    Returns:
        The sizes in samples, int64 of shape [workers]; they sum to the global batch.
    """
    if int(bounds.lower.sum()) == bounds.units:
        return bounds.lower * bounds.multiple
    times = _in_units(times, bounds)
    least, sizes = _least_time(times, bounds)
    if int(sizes.sum()) > bounds.units:
        sizes = shares(bounds.units, sizes, lower=_within(times, least - 1, bounds), upper=sizes)
    return sizes * bounds.multiple


def reachable(times: TimeModels, bounds: Bounds, nanoseconds: int) -> bool:
    """Whether some sizes within the bounds all finish within the given time; much cheaper than to solve it."""
    times = _in_units(times, bounds)
    sizes = _within(times, nanoseconds, bounds)
    return int(sizes.sum()) >= bounds.units and int(times.nanoseconds(bounds.lower).max()) <= nanoseconds


def _least_time(times: TimeModels, bounds: Bounds) -> tuple[int, IntArray]:
    """T, and the largest sizes within it; the lower limits must leave something to share out."""
    units, lower, upper = bounds.units, bounds.lower, bounds.upper
    # T is more than `low`, where the sizes lack `missing`, and at most `high`, where `surplus` are too many.
    low, missing = -1, units - int(lower.sum())
    high, surplus = None, 0
    guess = _on_straight_lines(times, bounds)
    guesses = 0
    while True:
        guesses += 1
        sizes = _within(times, guess, bounds)
        over = int(sizes.sum()) - units
        if over >= 0 and guess == low + 1:
            return guess, sizes
        bound = None
        if over >= 0:
            ends = np.sort(times.nanoseconds(sizes)[sizes > lower])
            high, surplus = int(ends[-1]), over
            if over < len(ends) and ends[-1 - over] > low + 1:
                bound = int(ends[-1 - over])
                low = bound - 1
            if high == low + 1:
                return high, sizes
        else:
            ends = np.sort(times.nanoseconds(sizes + 1)[sizes < upper])
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


def _in_units(times: TimeModels, bounds: Bounds) -> TimeModels:
    return times if bounds.multiple == 1 else InMultiples(times=times, multiple=bounds.multiple)


def _within(times: TimeModels, nanoseconds: int, bounds: Bounds) -> IntArray:
    """The largest sizes that finish within the time, clipped to the limits."""
    return np.minimum(np.maximum(times.largest(nanoseconds), bounds.lower), bounds.upper)


def _on_straight_lines(times: TimeModels, bounds: Bounds) -> int:
    """When all end, were each model the line through an equal share and twice that, and the sizes without limits."""
    workers = len(bounds.lower)
    share = max(bounds.units // workers, 1)
    sizes = np.full(workers, share)
    ends = times.nanoseconds(sizes)
    speeds = share / np.maximum(times.nanoseconds(sizes + sizes) - ends, 1)
    return max(int((bounds.units - share * workers + float(speeds @ ends)) / float(speeds.sum())), 0)
