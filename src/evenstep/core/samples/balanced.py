"""Divides a slice whose samples differ in cost among the workers, so that all finish together.

The predicted time of a worker is the cost of its samples over its speed, in any units that are the same for all
workers. A fixed time per sample is part of each sample's cost.
"""

from heapq import heapify, heappop, heapreplace
from itertools import product
from typing import Final

import numpy as np

from evenstep.core.values import IntArray

_FREE: Final = -1


def balanced(
    costs: IntArray,
    speeds: IntArray,
    *,
    lower: IntArray,
    upper: IntArray,
    owners: IntArray | None = None,
    precision: float = 0.002,
    steps: int = 4,
    partners: int = 4,
) -> IntArray:
    """Divide samples so that the latest predicted time is short: largest first, then exchanges between two workers.

    The sample that costs most goes to the worker that is furthest below the cost at which all end together, and so on
    (LPT, Graham 1969, with targets for different speeds). Then the latest worker gives a sample to one of the earliest,
    or exchanges one for another, as long as this helps. Sums and targets are integers, so the result is the same on
    every processor. Scheduling of this kind is NP-hard, and this solution is not exact. On random slices with eight or
    more samples per worker, none of which costs more than half of what the slowest worker computes, it is within 2 % of
    a lower bound (tested).

    Args:
        costs: The cost of each sample, int64 of shape [slice], 1 to 2^31.
        speeds: Cost that each worker computes in a unit of time, int64 of shape [workers], >= 1 where `upper` is.
        lower: The fewest samples of each worker, int64 of shape [workers].
        upper: The most samples of each worker, int64 of shape [workers]. Some counts within both must sum to the slice.
        owners: The present assignment, if there is one: each worker keeps those of its samples that fit, the costliest
            first, so that little of what it has fetched is wasted.
        precision: Exchanges end when the latest worker takes longer only by this fraction than if all ended together;
            times of iterations differ by more.
        steps: The most exchanges for each worker, so that the time of the search grows with workers and samples.
        partners: The number of workers that are tried for each exchange, the earliest first.

    Returns:
        The worker of each sample, int64 of shape [slice].

    >>> some = np.array([2, 2]), np.array([9, 9])
    >>> balanced(np.array([9, 1, 2, 6, 3, 3]), np.array([1, 1]), lower=some[0], upper=some[1]).tolist()
    [0, 1, 1, 1, 1, 0]
    """
    # The cost at which each worker would end together with all others, rounded down.
    whole, speed = int(costs.sum()), max(int(speeds.sum()), 1)
    targets = [own * whole // speed for own in speeds.tolist()]
    largest_first = np.argsort(-costs, kind="stable")
    dealt = np.full(len(costs), _FREE) if owners is None else _kept(costs, largest_first, owners, targets, upper)
    _deal(costs, largest_first, dealt, targets, upper)
    _give_minimum(costs, dealt, lower)
    _exchange(costs, dealt, speeds, lower, upper, precision=precision, steps=steps * len(speeds), partners=partners)
    return dealt


def _kept(costs: IntArray, largest_first: IntArray, owners: IntArray, targets: list[int], upper: IntArray) -> IntArray:
    """The assignment with only the samples that fit into their workers' targets."""
    kept = np.full_like(owners, _FREE)
    of_order = owners[largest_first]
    for worker, target in enumerate(targets):
        own = largest_first[of_order == worker][: int(upper[worker])]
        kept[own[np.cumsum(costs[own]) <= target]] = worker
    return kept


def _deal(costs: IntArray, largest_first: IntArray, dealt: IntArray, targets: list[int], upper: IntArray) -> None:
    """Give the free samples to the workers that are furthest below their targets.

    Large samples are dealt one by one, at least an 8th of the rest in a round, then many at a time while they cost less
    than a 16th of what each worker still lacks, which is faster and lets later ones compensate for rounding, and the
    last ones one by one again.
    """
    workers, goals = len(targets), np.array(targets)
    free = largest_first[dealt[largest_first] == _FREE]
    counts, loads = _totals(costs, dealt, workers)

    def take(chosen: IntArray, given: IntArray) -> None:
        dealt[chosen] = given
        np.add.at(counts, given, 1)
        np.add.at(loads, given, costs[chosen])

    while len(free):
        wanted, part, given = goals - loads, free[: len(free) // 2], None
        large = int((costs[free] * 16 > wanted.min()).sum())
        if len(part) <= workers:
            part = free
        elif large:
            part = free[: max(large, len(free) // 8)]
        else:
            given = consecutive(costs[part], wanted)
        if given is None or (counts + np.bincount(given, minlength=workers) > upper).any():
            given = _one_by_one(costs[part] * workers, -wanted, upper - counts)
        take(part, given)
        free = free[len(part) :]


def consecutive(costs: IntArray, wanted: IntArray) -> IntArray:
    """The workers of consecutive samples, with costs in proportion to `wanted` to within one sample."""
    ends, passed = np.cumsum(wanted), np.cumsum(costs)
    # Quotients of float64 are rounded alike on every processor.
    given: IntArray = np.searchsorted(ends / ends[-1], (2 * passed - costs) / (2 * passed[-1]), side="right")
    return given


def _one_by_one(steps: IntArray, distances: IntArray, room: IntArray) -> IntArray:
    """The worker of each sample: of those with room, the one nearest its target, lowest rank first.

    `steps` are costs times the number of workers: a distance and a rank make one integer, which a heap compares faster
    than a pair.
    """
    workers, left, chosen = len(room), room.tolist(), []
    heap = [distance * workers + rank for rank, distance in enumerate(distances.tolist()) if left[rank] > 0]
    heapify(heap)
    for step in steps.tolist():
        rank = heap[0] % workers
        chosen.append(rank)
        left[rank] -= 1
        if left[rank]:
            heapreplace(heap, heap[0] + step)
        else:
            heappop(heap)
    return np.array(chosen, dtype=np.int64)


def _totals(costs: IntArray, dealt: IntArray, workers: int) -> tuple[IntArray, IntArray]:
    """The number of samples of each worker, and their cost."""
    has = dealt != _FREE
    loads = np.zeros(workers, dtype=np.int64)
    np.add.at(loads, dealt[has], costs[has])
    return np.bincount(dealt[has], minlength=workers), loads


def _give_minimum(costs: IntArray, dealt: IntArray, lower: IntArray) -> None:
    """Move the cheapest samples to workers that have too few samples."""
    counts = np.bincount(dealt, minlength=len(lower))
    while (lacking := np.flatnonzero(counts < lower)).size:
        spare = np.flatnonzero((counts > lower)[dealt])
        moved = spare[np.argmin(costs[spare])]
        counts[dealt[moved]] -= 1
        counts[lacking[0]] += 1
        dealt[moved] = lacking[0]


def _exchange(
    costs: IntArray,
    dealt: IntArray,
    speeds: IntArray,
    lower: IntArray,
    upper: IntArray,
    *,
    precision: float,
    steps: int,
    partners: int,
) -> None:
    """Let the latest worker give to one of the earliest, while the later of the two then ends earlier."""
    workers = len(speeds)
    counts, loads = _totals(costs, dealt, workers)
    pace = np.maximum(speeds, 1)
    goal = (1.0 + precision) * float(loads.sum()) / float(pace.sum())
    for _ in range(steps):
        ends = loads / pace
        order = np.argsort(ends, kind="stable")
        late = int(order[-1])
        if ends[late] <= goal:
            return
        for early in order[: min(partners, workers - 1)].tolist():
            pair = _best_exchange(
                np.flatnonzero(dealt == late),
                np.flatnonzero(dealt == early),
                costs,
                # The cost with which both end together, and that with which the early one ends when the late one did.
                fitting=(int(pace[early]) * int(loads[late]) - int(pace[late]) * int(loads[early]))
                / int(pace[early] + pace[late]),
                most=float(ends[late]) * int(pace[early]) - int(loads[early]),
                moves=bool(counts[late] > lower[late] and counts[early] < upper[early] and speeds[early]),
            )
            if pair is not None:
                break
        else:
            return
        _carry_out(pair, late, early, costs, dealt, counts, loads)


def fitted(owners: IntArray, memory: IntArray, room: IntArray, *, lower: IntArray, upper: IntArray) -> IntArray:
    """An assignment in which no worker has more than it holds, if single moves and exchanges that help achieve that.

    The worker that has most too much gives one sample, or exchanges it for another, to one of those with room left,
    most first: as little as is enough, or else as much as fits. `memory` is that of each sample, int64 of shape
    [slice], and `room` that of each worker, int64 of shape [workers]; the other arguments are those of `balanced`.
    """
    owners = owners.copy()
    counts, loads = _totals(memory, owners, len(room))
    stuck = np.zeros(len(room), dtype=bool)
    for _ in range(len(owners) + len(room)):
        left = room - loads
        late, order = int(np.argmin(np.where(stuck, 0, left))), np.argsort(-left, kind="stable")
        own, excess = np.flatnonzero(owners == late), -int(left[late])
        if excess <= 0 or stuck[late]:
            break
        pair, enough = None, (excess,) if memory[own].max() >= excess else ()
        for least, early in product((*enough, 1), order.tolist()):
            if left[early] < least:
                continue
            pair = _best_exchange(
                own,
                np.flatnonzero(owners == early),
                memory,
                fitting=min(excess, int(left[early])),
                least=least,
                most=int(left[early]) + 1,
                moves=bool(counts[late] > lower[late] and counts[early] < upper[early]),
            )
            if pair is not None:
                break
        if pair is None:
            stuck[late] = True
        else:
            _carry_out(pair, late, early, memory, owners, counts, loads)
    return owners


def _carry_out(
    pair: tuple[int, int | None],
    late: int,
    early: int,
    costs: IntArray,
    dealt: IntArray,
    counts: IntArray,
    loads: IntArray,
) -> None:
    """Give a sample of the late worker to the early, and the early's to the late if there is one."""
    given, taken = pair
    dealt[given], difference = early, int(costs[given])
    if taken is None:
        counts[late], counts[early] = counts[late] - 1, counts[early] + 1
    else:
        dealt[taken], difference = late, difference - int(costs[taken])
    loads[late] -= difference
    loads[early] += difference


def _best_exchange(
    late: IntArray, early: IntArray, costs: IntArray, *, fitting: float, least: int = 1, most: float, moves: bool
) -> tuple[int, int | None] | None:
    """A sample of the late worker and one of the early, or none, whose difference fits best; None if none helps.

    The difference is at least `least`, and below `most`.
    """
    partners = early[np.argsort(costs[early], kind="stable")]
    taken = np.concatenate((np.zeros(int(moves), dtype=np.int64), costs[partners]))
    if not len(taken) or not len(late):
        return None
    above = np.searchsorted(taken, costs[late] - fitting)
    places = np.stack((np.maximum(above - 1, 0), np.minimum(above, len(taken) - 1)))
    differences = costs[late] - taken[places]
    misses = np.where((differences >= least) & (differences < most), np.abs(differences - fitting), np.inf)
    best = int(np.argmin(misses))
    if not misses.flat[best] < np.inf:
        return None
    place = int(places.flat[best]) - int(moves)
    return int(late[best % len(late)]), None if place < 0 else int(partners[place])
