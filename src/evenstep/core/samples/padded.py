"""Divides a slice among the workers when every batch is padded to its longest sample.

The predicted time of a worker is n * longest / speed for n samples, in any units that are the same for
all workers.
"""

from typing import Final

import numpy as np

from evenstep.core.values import IntArray

_NO_LIMIT: Final = 2**62
_CLOSE_ENOUGH: Final = 1000
"""Times are searched with this relative precision (one in 1000)."""


def balanced_padded(
    costs: IntArray,
    speeds: IntArray,
    *,
    lower: IntArray,
    upper: IntArray,
    memory: IntArray | None = None,
    room: IntArray | None = None,
) -> IntArray:
    """Divide samples so that the latest predicted time is short, with samples of similar length on each worker.

    The samples are sorted, and each worker has neighbours in this order, the fastest worker the longest: a slow worker
    with one long sample would pad all others to its length. The least time in which every sample has a worker is found
    by bisection.

    Arguments and result are those of `balanced`, with costs without further padding. If a sample is the longest, it
    takes its `memory` (None: its cost) for each of a worker's samples. The `room` of each worker, int64 of shape
    [workers], is exceeded only if the slice does not fit otherwise in this order; None: it is not limited.

    >>> some = {"lower": np.array([1, 1]), "upper": np.array([9, 9])}
    >>> balanced_padded(np.array([9, 1, 2, 1, 3, 3]), np.array([1, 1]), **some).tolist()
    [0, 1, 1, 1, 1, 1]
    """
    fastest_first = np.argsort(-speeds, kind="stable")
    longest_first = np.argsort(-costs, kind="stable")
    sorted_costs = costs[longest_first].tolist()
    taken = (costs if memory is None else memory)[longest_first].tolist()
    room = np.full_like(speeds, _NO_LIMIT) if room is None else room
    workers = list(zip(*(each[fastest_first].tolist() for each in (speeds, lower, upper, room)), strict=True))
    if _counts(sorted_costs, taken, workers, _NO_LIMIT, 1) is None:
        workers = [(*each[:3], _NO_LIMIT) for each in workers]
    # In units of a `_CLOSE_ENOUGH`-th of the time that all would need without padding.
    work, speed = sum(sorted_costs), max(int(speeds.sum()), 1) * _CLOSE_ENOUGH
    low, high = 0, _CLOSE_ENOUGH
    while (counts := _counts(sorted_costs, taken, workers, high * work, speed)) is None:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        fewer = _counts(sorted_costs, taken, workers, middle * work, speed)
        if fewer is None:
            low = middle
        else:
            high, counts = middle, fewer
    owners = np.empty(len(costs), dtype=np.int64)
    owners[longest_first] = np.repeat(fastest_first, counts)
    return owners


def _counts(
    costs: list[int], memory: list[int], workers: list[tuple[int, int, int, int]], time: int, unit: int
) -> list[int] | None:
    """The number of sorted samples that each worker takes to end within time / unit; None if some are left over."""
    counts: list[int] = []
    begin, length = 0, len(costs)
    needed, open_places = sum(each[1] for each in workers), sum(each[2] for each in workers)
    for speed, lower, upper, room in workers:
        needed, open_places = needed - lower, open_places - upper
        able = min(speed * time // unit // costs[begin], room // memory[begin]) if begin < length else 0
        count = min(max(able, 0), upper, length - begin - needed)
        if count < lower:
            return None
        counts.append(count)
        begin += count
        if length - begin > open_places:
            return None
    return counts
