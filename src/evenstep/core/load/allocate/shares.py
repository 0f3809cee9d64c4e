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
    bounds = Bounds.of(total, lower, upper, multiple)
    weights = _scaled(weights, bounds.units)
    sizes = np.zeros_like(bounds.lower)
    rest = np.arange(len(sizes))
    units = bounds.units
    while len(rest):
        pull, lower, upper = weights[rest], bounds.lower[rest], bounds.upper[rest]
        if not pull.any():
            pull = np.ones_like(pull)
        whole = int(pull.sum())
        ideal = pull * units
        above = np.maximum(ideal - upper * whole, 0)
        below = np.maximum(lower * whole - ideal, 0)
        excess, lack = int(above.sum()), int(below.sum())
        if not excess and not lack:
            sizes[rest] = _largest_remainder(ideal, whole, units)
            break
        pinned = np.zeros(len(rest), dtype=np.bool_)
        if excess >= lack:
            pinned |= above > 0
        if lack >= excess:
            pinned |= below > 0
        limit = np.where(above > 0, upper, lower)[pinned]
        sizes[rest[pinned]] = limit
        units -= int(limit.sum())
        rest = rest[~pinned]
    return sizes * multiple


def _largest_remainder(ideal: IntArray, whole: int, units: int) -> IntArray:
    """Round ideal / whole to integers that sum to `units`."""
    sizes, remainders = np.divmod(ideal, whole)
    missing = units - int(sizes.sum())
    sizes[np.argsort(-remainders, kind="stable")[:missing]] += 1
    return sizes


def _scaled(weights: IntArray, units: int) -> IntArray:
    """The weights, shifted down as far as units * sum(weights) needs to stay within 64 bits; none becomes 0 by it."""
    if (weights < 0).any():
        raise ConfigError(f"a weight of {int(weights.min())} is negative: weights start at 0")
    room = _PRODUCT_BITS - units.bit_length() - len(weights).bit_length()
    shift = int(weights.max(initial=0)).bit_length() - room
    return np.maximum(weights >> shift, np.minimum(weights, 1)) if shift > 0 else weights
