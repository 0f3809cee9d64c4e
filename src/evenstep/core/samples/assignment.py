"""Assigns the parts of a slice to workers so that, after a change of sizes, each keeps what it already holds.

An assignment is an int64 array `owners` of shape [slice length]: the worker of each position of the slice.
"""

import numpy as np

from evenstep.core.load.shares import shares
from evenstep.core.values import IntArray


def split(sizes: IntArray) -> IntArray:
    """The first assignment of a slice: consecutive parts in the order of the workers.

    >>> split(np.array([2, 0, 3])).tolist()
    [0, 0, 2, 2, 2]
    """
    return np.repeat(np.arange(len(sizes)), sizes)


def reassign(owners: IntArray, sizes: IntArray) -> IntArray:
    """The assignment after a change of sizes; every worker keeps the first positions of its part.

    A worker whose size shrinks gives up its last positions, and the workers whose sizes grow take those, in order. So
    only what must move moves (prefix sums would shift everybody's part when one size changes). As a pure function it
    gives the same result on every worker. `sizes` must sum to the length of the slice.

    >>> reassign(np.array([0, 0, 0, 1, 1, 2]), np.array([1, 2, 3])).tolist()
    [0, 2, 2, 1, 1, 2]
    """
    held = np.bincount(owners, minlength=len(sizes))
    by_worker = np.argsort(owners, kind="stable")
    nth_of_its_worker = np.arange(len(owners)) - np.repeat(np.cumsum(held) - held, held)
    given_up = np.sort(by_worker[nth_of_its_worker >= np.repeat(sizes, held)])
    result = owners.copy()
    result[given_up] = np.repeat(np.arange(len(sizes)), np.maximum(sizes - held, 0))
    return result


def part_of(owners: IntArray, worker: int, start: int) -> tuple[int, ...]:
    """The positions of a worker in a slice that begins at position `start`, ascending."""
    return tuple((np.flatnonzero(owners == worker) + start).tolist())


def slice_sizes(sizes: IntArray, length: int, minimum: int, *, even: bool = False) -> IntArray:
    """The sizes for a slice of `length` samples: the planned sizes, or others in their proportion.

    With `even` every worker gets a sample if there are enough. Only the lists of a user's batch sampler are ever longer
    than the planned sizes together.

    >>> slice_sizes(np.array([4, 4, 8, 16]), 9, minimum=2, even=True).tolist()
    [2, 2, 2, 3]
    >>> slice_sizes(np.array([1, 3]), 8, minimum=1).tolist()
    [2, 6]
    """
    whole, workers = int(sizes.sum()), len(sizes)
    if length == whole:
        return sizes
    if length > whole:
        return shares(length, sizes, lower=sizes, upper=np.full_like(sizes, length))
    if even and length >= workers:
        return shares(length, sizes, lower=np.minimum(sizes, min(minimum, length // workers)), upper=sizes)
    return short_slice_sizes(sizes, length, minimum)


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
