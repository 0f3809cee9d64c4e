"""The sizes that finish earliest: minimises the largest predicted time, in exact integers."""

import numpy as np

from evenstep.core.load.allocate.bounds import Bounds
from evenstep.core.load.allocate.shares import shares
from evenstep.core.load.base import TimeModels
from evenstep.core.values import IntArray, Problem


def solve(times: TimeModels, problem: Problem) -> IntArray:
    """Sizes with the smallest possible largest predicted time (LB-BSP, the problem of its section on GPU clusters).

    The smallest T, in nanoseconds, at which the workers' largest sizes within T sum to the global batch is found by
    bisection, guided by interpolation; both ends of the bracket are moved to the nearest time at which some size
    changes, so that few steps are needed. Workers that would need exactly T for their next samples share what is then
    left, in proportion to their sizes. The papers give no solver; this one is ours.

    Args:
        times: monotone time models of all workers.
        problem: what the sizes must satisfy.

    Returns:
        The sizes in samples, int64 of shape [workers]; they sum to the global batch.

    Raises:
        ConfigError: where the problem's limits admit no sizes.
    """
    batch, multiple = problem.global_batch_size, problem.multiple
    bounds = Bounds.of(batch, problem.minimum, problem.maximum, multiple)
    lower, upper = bounds.lower * multiple, bounds.upper * multiple
    start = shares(batch, np.ones_like(lower), lower=lower, upper=upper, multiple=multiple)
    above_least, below_most = start > lower, start < upper
    if not above_least.any() or not below_most.any():
        return start
    # At `high` every worker has its start; below `low` + 1 none has more, and the slowest of those that could has less.
    high = int(times.nanoseconds(start)[above_least].max())
    low = min(int(times.nanoseconds(start + multiple)[below_most].min()), high) - 1
    few, many = _within(times, low, lower, upper, multiple), _within(times, high, lower, upper, multiple)
    missing, surplus = batch - int(few.sum()), int(many.sum()) - batch
    interpolate = True
    while high - low > 1:
        step = (high - low) * missing // (missing + surplus) if interpolate else (high - low) // 2
        interpolate = not interpolate
        sizes = _within(times, min(max(low + step, low + 1), high - 1), lower, upper, multiple)
        over = int(sizes.sum()) - batch
        if over >= 0:
            many, surplus = sizes, over
            high = int(times.nanoseconds(sizes)[sizes > lower].max())
        else:
            few, missing = sizes, -over
            low = int(times.nanoseconds(sizes + multiple)[sizes < upper].min()) - 1
    if not surplus:
        return many
    return shares(batch, many, lower=few, upper=many, multiple=multiple)


def reachable(times: TimeModels, problem: Problem, nanoseconds: int) -> bool:
    """Whether some sizes that satisfy the problem all finish within the given time; much cheaper than to solve it."""
    multiple = problem.multiple
    bounds = Bounds.of(problem.global_batch_size, problem.minimum, problem.maximum, multiple)
    lower, upper = bounds.lower * multiple, bounds.upper * multiple
    sizes = _within(times, nanoseconds, lower, upper, multiple)
    return int(sizes.sum()) >= problem.global_batch_size and int(times.nanoseconds(lower).max()) <= nanoseconds


def _within(times: TimeModels, nanoseconds: int, lower: IntArray, upper: IntArray, multiple: int) -> IntArray:
    """The largest sizes that finish within the time, clipped to the limits."""
    largest = times.largest(nanoseconds)
    if multiple > 1:
        largest = largest // multiple * multiple
    return np.minimum(np.maximum(largest, lower), upper)
