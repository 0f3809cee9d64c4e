"""Shares a whole number out in proportion to weights, exactly: the sum never loses or gains a sample."""

import numpy as np

from evenstep.core.errors import ConfigError
from evenstep.core.load.allocate.bounds import Bounds
from evenstep.core.values import IntArray

_PRODUCT_BITS = 62


def shares(total: int, weights: IntArray, *, lower: IntArray, upper: IntArray, multiple: int = 1) -> IntArray:
    """Share `total` samples out in proportion to `weights`, within limits and in multiples, by largest remainder.

    Each worker gets its quota total * weight / sum(weights), rounded down; what is left goes to the largest remainders,
    ties to the lowest index (Hamilton's method; DBS rounds the same way but loses samples, see its policy). A quota
    beyond a limit is set to the limit and the rest shared out again among the others, the worse violated side first,
    which gives the sizes closest to proportional that the limits allow. Where all weights are 0 they count as equal.

    All arithmetic is on integers, so that every processor gets the same sizes. Weights so large that a product would
    not fit 64 bits are all scaled down by the same power of two.

    Args:
        total: samples to share out.
        weights: int64 of shape [workers], >= 0, in any unit.
        lower: least size of each worker in samples, int64 of shape [workers].
        upper: largest size of each worker in samples, int64 of shape [workers].
        multiple: every size is a multiple of this.

    Returns:
        The sizes in samples, int64 of shape [workers]; they sum to `total`.

    Raises:
        ConfigError: where the limits admit no such sizes.
    """
    return share_out(Bounds.of(total, lower, upper, multiple), weights)


def share_out(bounds: Bounds, weights: IntArray) -> IntArray:
    """As `shares`, for bounds that are known already."""
    pull, lower, upper, units = _scaled(weights, bounds.units), bounds.lower, bounds.upper, bounds.units
    sizes = np.empty_like(lower)
    rest = np.arange(len(sizes))
    while len(rest):
        whole = int(pull.sum())
        if not whole:
            pull, whole = np.ones_like(pull), len(pull)
        ideal = pull * units
        above, below = ideal - upper * whole, lower * whole - ideal
        if int(np.maximum(above, below).max()) <= 0:
            sizes[rest] = _largest_remainder(ideal, whole, units)
            break
        over, under = above > 0, below > 0
        excess, lack = int(above[over].sum()), int(below[under].sum())
        pinned = over if excess > lack else under if lack > excess else over | under
        limit = np.where(over, upper, lower)[pinned]
        sizes[rest[pinned]] = limit
        units -= int(limit.sum())
        free = ~pinned
        rest, pull, lower, upper = rest[free], pull[free], lower[free], upper[free]
    return sizes * bounds.multiple


def _largest_remainder(ideal: IntArray, whole: int, units: int) -> IntArray:
    """Round ideal / whole to integers that sum to `units`."""
    sizes, remainders = np.divmod(ideal, whole)
    missing = units - int(sizes.sum())
    sizes[np.argsort(-remainders, kind="stable")[:missing]] += 1
    return sizes


def _scaled(weights: IntArray, units: int) -> IntArray:
    """The weights, shifted down as far as units * sum(weights) needs to stay within 64 bits; none becomes 0 by it."""
    if (least := int(weights.min(initial=0))) < 0:
        raise ConfigError(f"a weight of {least} is negative: weights start at 0")
    room = _PRODUCT_BITS - units.bit_length() - len(weights).bit_length()
    shift = int(weights.max(initial=0)).bit_length() - room
    return np.maximum(weights >> shift, np.minimum(weights, 1)) if shift > 0 else weights
