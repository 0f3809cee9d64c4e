"""Shares a whole number out in proportion to weights, within limits; the sum is always exact."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Self, final

import numpy as np

from evenstep.core.errors import ConfigError
from evenstep.core.values import IntArray, Problem

_PRODUCT_BITS: Final = 62


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bounds:
    """Limits in units of `multiple` samples: sum = `units`, `lower` <= size <= `upper`, both int64 of shape [workers].

    `upper` is never more than `units`, so that products of it stay within 64 bits.
    """

    units: int
    lower: IntArray
    upper: IntArray
    multiple: int

    @classmethod
    def of(cls, total: int, lower: IntArray, upper: IntArray, multiple: int) -> Self:
        """From limits in samples: lower limits are rounded up to the multiple, upper limits down.

        Raises:
            ConfigError: No sizes satisfy the limits; the message names the limit to change.
        """
        if multiple < 1:
            raise ConfigError(f"sizes cannot be multiples of {multiple}: use a multiple of at least 1")
        if total % multiple:
            raise ConfigError(
                f"the global batch of {total} samples is not a multiple of {multiple}: change one of the two"
            )
        units, least, most = total, lower, upper
        if multiple > 1:
            units, least, most = total // multiple, -(-lower // multiple), upper // multiple
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
                f"worker {worker} has no size between {int(lower[worker])} and {int(upper[worker])} that is a multiple "
                f"of {multiple}: widen its limits or lower the multiple"
            )
        return cls(units=units, lower=least, upper=most, multiple=multiple)

    @classmethod
    @lru_cache(maxsize=4)  # A problem lasts for many iterations.
    def of_problem(cls, problem: Problem) -> Self:
        """As `of`, from the limits of this problem."""
        return cls.of(problem.global_batch_size, problem.minimum, problem.maximum, problem.multiple)


def shares(total: int, weights: IntArray, *, lower: IntArray, upper: IntArray, multiple: int = 1) -> IntArray:
    """Share `total` samples out in proportion to `weights`, within limits and in multiples, by largest remainder.

    Each worker gets its quota total * weight / sum(weights), rounded down. The rest goes to the largest remainders,
    ties to the lowest index (Hamilton's method; DBS rounds the same way but loses samples, see its policy). A quota
    beyond a limit is set to the limit, and the rest is shared out again among the other workers, the worse violated
    side first. This gives the sizes closest to proportional that the limits allow. If all weights are 0, they count as
    equal.

    All arithmetic is on integers, so that every processor gets the same sizes. If a product of the weights would not
    fit 64 bits, all are scaled down by the same power of two.

    Args:
        total: Samples to share out.
        weights: int64 of shape [workers], >= 0, in any unit.
        lower: The smallest size of each worker in samples, int64 of shape [workers].
        upper: The largest size of each worker in samples, int64 of shape [workers].
        multiple: Every size is a multiple of this.

    Returns:
        The sizes in samples, int64 of shape [workers]; they sum to `total`.

    Raises:
        ConfigError: The limits admit no such sizes.
    """
    return share_out(Bounds.of(total, lower, upper, multiple), weights)


def shares_of(problem: Problem, weights: IntArray) -> IntArray:
    """As `shares`, for the samples and the limits of this problem."""
    return share_out(Bounds.of_problem(problem), weights)


def share_out(bounds: Bounds, weights: IntArray) -> IntArray:
    """As `shares`, within these bounds."""
    pull, lower, upper, units = _scaled(weights, bounds.units), bounds.lower, bounds.upper, bounds.units
    sizes = np.empty_like(lower)
    rest = np.arange(len(sizes))
    while len(rest):
        whole = int(np.add.reduce(pull))
        if not whole:
            pull, whole = np.ones_like(pull), len(pull)
        ideal = pull * units
        above, below = ideal - upper * whole, lower * whole - ideal
        if int(np.maximum.reduce(np.maximum(above, below))) <= 0:
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
    missing = units - int(np.add.reduce(sizes))
    sizes[np.argsort(-remainders, kind="stable")[:missing]] += 1
    return sizes


def _scaled(weights: IntArray, units: int) -> IntArray:
    """The weights, shifted down until units * sum(weights) fits 64 bits; no positive weight becomes 0."""
    if (least := int(weights.min(initial=0))) < 0:
        raise ConfigError(f"a weight of {least} is negative: weights start at 0")
    room = _PRODUCT_BITS - units.bit_length() - len(weights).bit_length()
    shift = int(weights.max(initial=0)).bit_length() - room
    return np.maximum(weights >> shift, np.minimum(weights, 1)) if shift > 0 else weights
