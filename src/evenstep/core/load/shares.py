"""Divides a whole number in proportion to weights, within limits; the sum is always exact."""

from dataclasses import replace
from functools import lru_cache

import numpy as np

from evenstep.core.errors import ConfigError
from evenstep.core.values import IntArray, Problem


@lru_cache(maxsize=4)  # A problem lasts for many iterations.
def in_multiples(problem: Problem) -> Problem:
    """The problem with sizes counted in multiples: lower limits are rounded up, upper limits down.

    No upper limit is more than the global batch, so that products of it stay within 64 bits.

    Raises:
        ConfigError: No sizes satisfy the limits; the message names the limit to change.
    """
    total, multiple = problem.global_batch_size, problem.multiple
    if total % multiple:
        raise ConfigError(f"the global batch of {total} samples is not a multiple of {multiple}: change one of the two")
    units, least, most = total, problem.minimum, problem.maximum
    if multiple > 1:
        units, least, most = total // multiple, -(-least // multiple), most // multiple
    least, most = np.maximum(least, 0), np.minimum(most, units)
    if (needed := int(np.add.reduce(least))) > units:
        raise ConfigError(
            f"{len(least)} workers need at least {needed * multiple} samples together, more than the global batch "
            f"of {total}: lower the minimum sizes or raise the global batch size"
        )
    if (possible := int(np.add.reduce(most))) < units:
        raise ConfigError(
            f"{len(most)} workers can take at most {possible * multiple} samples together, fewer than the global "
            f"batch of {total}: raise the maximum sizes or lower the global batch size"
        )
    if np.logical_or.reduce(least > most):
        worker = int(np.argmax(least > most))
        raise ConfigError(
            f"worker {worker} has no size between {int(problem.minimum[worker])} and {int(problem.maximum[worker])} "
            f"that is a multiple of {multiple}: widen its limits or lower the multiple"
        )
    return replace(problem, global_batch_size=units, minimum=least, maximum=most)


def shares(total: int, weights: IntArray, *, lower: IntArray, upper: IntArray, multiple: int = 1) -> IntArray:
    """Divide `total` samples in proportion to `weights`, within limits and in multiples, by largest remainder.

    Each worker gets its quota total * weight / sum(weights), rounded down. The rest goes to the largest remainders,
    ties to the lowest index (Hamilton's method; DBS rounds the same way but loses samples, see its policy). A quota
    beyond a limit is set to the limit, and the rest is divided again among the other workers, the worse violated side
    first. This gives the sizes closest to proportional that the limits allow. If all weights are 0, they count as
    equal.

    All arithmetic is on integers, so that every processor gets the same sizes. If a product of the weights would not
    fit 64 bits, all are scaled down by the same power of two. Weights are >= 0, limits and sizes are in samples; all
    are int64 of shape [workers].

    Raises:
        ConfigError: No such sizes satisfy the limits.
    """
    problem = Problem(global_batch_size=total, minimum=lower, maximum=upper, multiple=multiple)
    return share_out(in_multiples(problem), weights)


def shares_of(problem: Problem, weights: IntArray) -> IntArray:
    """Like `shares`, for the samples and the limits of this problem."""
    return share_out(in_multiples(problem), weights)


def share_out(limits: Problem, weights: IntArray, *, in_least_time: bool = False) -> IntArray:
    """Like `shares`, for limits that `in_multiples` returned; the sizes are in samples.

    Args:
        limits: The limits in units.
        weights: The weights, or the speeds.
        in_least_time: Round such that the largest size / weight is the smallest possible (D'Hondt's method), instead of
            by largest remainder: one unit more costs a slow worker most. For 8 units and speeds 1:1:4, largest
            remainder gives 2:1:5, which takes 2 units of time, and this gives 1:1:6, which takes 1.5.
    """
    units, lower, upper = limits.global_batch_size, limits.minimum, limits.maximum
    if (least := int(np.minimum.reduce(weights, initial=0))) < 0:
        raise ConfigError(f"a weight of {least} is negative: weights start at 0")
    # Shifted down until units * sum(weights) fits 64 bits; no positive weight becomes 0.
    room = 62 - units.bit_length() - len(weights).bit_length()
    shift = int(np.maximum.reduce(weights, initial=0)).bit_length() - room
    pull = np.maximum(weights >> shift, np.minimum(weights, 1)) if shift > 0 else weights
    sizes = np.zeros(len(lower), dtype=np.int64)
    rest = np.arange(len(sizes))
    while len(rest):
        whole = int(np.add.reduce(pull))
        if not whole:
            pull, whole = np.ones_like(pull), len(pull)
        ideal = pull * units
        above, below = ideal - upper * whole, lower * whole - ideal
        if int(np.maximum.reduce(np.maximum(above, below))) <= 0:
            if in_least_time:
                sizes[rest] = _least_time(units, pull, lower, upper)
            else:
                quotas, remainders = np.divmod(ideal, whole)
                missing = units - int(np.add.reduce(quotas))
                quotas[(-remainders).argsort(kind="stable")[:missing]] += 1
                sizes[rest] = quotas
            break
        over, under = above > 0, below > 0
        excess, lack = int(np.add.reduce(above[over])), int(np.add.reduce(below[under]))
        pinned = over if excess > lack else under if lack > excess else over | under
        limit = np.where(over, upper, lower)[pinned]
        sizes[rest[pinned]] = limit
        units -= int(np.add.reduce(limit))
        free = ~pinned
        rest, pull, lower, upper = rest[free], pull[free], lower[free], upper[free]
    return sizes * limits.multiple


def _least_time(units: int, speeds: IntArray, lower: IntArray, upper: IntArray) -> IntArray:
    """Round such that the largest size / speed is the smallest possible; ties go to the lowest index."""
    paces = 1.0 / np.maximum(speeds, 1e-9)  # A worker of weight 0 comes last.
    time = (units + len(speeds) / 2) / int(np.add.reduce(speeds))  # Rounding down loses half a unit on average.
    sizes = np.minimum(np.maximum((time * speeds).astype(np.int64), lower), upper)
    while missing := units - int(np.add.reduce(sizes)):
        if missing > 0:
            times, further = (sizes + 1) * paces, (sizes + 2) * paces
            times[sizes >= upper] = further[sizes + 1 >= upper] = np.inf
            first = times.argsort(kind="stable")[:missing]
        else:
            times, further = -sizes * paces, (1 - sizes) * paces
            times[sizes <= lower] = further[sizes - 1 <= lower] = np.inf
            first = -1 - times[::-1].argsort(kind="stable")[:-missing]
        # All at once that come before a second unit of any of them; one by one takes long with thousands alike.
        sizes[first[times[first] < np.minimum.reduce(further[first])]] += 1 if missing > 0 else -1
    return sizes


def short_slice_sizes(sizes: IntArray, length: int, minimum: int) -> IntArray:
    """The sizes for a slice that is shorter than the sum of the planned sizes, in their proportion.

    Each worker gets nothing, or at least `minimum` samples where possible (a batch norm needs two), and never more than
    its planned size. Multiples do not apply here.

    >>> short_slice_sizes(np.array([4, 4, 8, 16]), 5, minimum=2).tolist()
    [0, 0, 2, 3]
    """
    nothing = np.zeros_like(sizes)
    plain = shares(length, sizes, lower=nothing, upper=sizes)
    if minimum <= 1 or not np.any((plain > 0) & (plain < minimum)):
        return plain
    # Leave out the workers with the smallest sizes until the rest can have the minimum each.
    working = np.argsort(-sizes, kind="stable")[: length // minimum]
    upper = nothing.copy()
    upper[working] = sizes[working]
    lower = np.minimum(upper, minimum)
    if upper.sum() < length or lower.sum() > length:
        return plain
    return shares(length, sizes, lower=lower, upper=upper)
