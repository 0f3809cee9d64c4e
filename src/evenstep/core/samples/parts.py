"""`evenstep.balance`: items of known cost, divided among workers; the code that divides slices by cost."""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from evenstep.core.errors import ConfigError
from evenstep.core.samples.balanced import balanced, fitted
from evenstep.core.samples.costs import Costs
from evenstep.core.samples.micro_batches import pieces
from evenstep.core.shown import shown
from evenstep.core.values import UNLIMITED, FloatArray, IntArray, require_whole


def balance(
    costs: npt.ArrayLike,
    workers: int,
    *,
    speeds: Sequence[float] | None = None,
    capacity: float | Sequence[float] | None = None,
    equal_counts: bool = False,
    micro_batch_cost: float | None = None,
    precision: float = 1e-5,
) -> list[list[list[int]]]:
    """Divide items of known cost among workers so that all finish together, such as rollouts by their tokens.

    The predicted time of a worker is the cost of its items over its speed. Every item has one worker, and every worker
    has an item if there are enough. The result depends on the arguments alone, so workers that call it with the same
    ones need no message. Numbers of micro-batches may differ between workers. Items are divided like the slices of a
    loader with `cost`: largest first, then exchanges between two workers (LPT, Graham 1969; see `balanced`).

    Args:
        costs: The cost of each item in any unit, such as its tokens; an array of shape [items], finite and above 0.
        workers: The number of workers.
        speeds: The speed of each worker, in any unit; None: all are equally fast.
        capacity: The most that a worker's items may cost together, for all workers or for each one.
        equal_counts: Give all workers the same number of items, up to one.
        micro_batch_cost: The most that a micro-batch may cost; None: each worker's items are one micro-batch.
        precision: Exchanges end when the latest worker takes longer than the average only by this fraction.

    Returns:
        For each worker its micro-batches: lists of indices of items, ascending.

    Raises:
        ConfigError: An argument is wrong, or no division within the capacities was found.

    >>> balance([9, 1, 2, 6, 3, 3], 2)
    [[[0, 5]], [[1, 2, 3, 4]]]
    >>> balance([9, 1, 2, 6, 3, 3], 2, speeds=[1, 2], micro_batch_cost=10)
    [[[2, 3]], [[0], [1, 4, 5]]]
    """
    workers, given = require_whole("workers", workers, 1, UNLIMITED), _numbers("costs", costs)
    if given.ndim != 1:
        raise ConfigError(f"costs must be one number for each item, not {shown(costs)}")
    if not len(given):
        return [[] for _ in range(workers)]
    all_costs = Costs.of(given, len(given), name="item")
    # Costs are whole numbers, of which the largest is about 2^30.
    units, per_cost = all_costs.units, float(all_costs.units.max()) / float(given.max())
    items, paces = len(units), np.ones(workers) if speeds is None else _of_workers("speeds", speeds, workers)
    lower = np.full(workers, items // workers if equal_counts else min(items // workers, 1))
    upper = np.full(workers, -(-items // workers) if equal_counts else items)

    def divided(paces: FloatArray) -> IntArray:
        # Whole numbers, so that all workers divide alike.
        whole = np.maximum(np.rint(paces / paces.max() * 2**20), 1).astype(np.int64)
        return balanced(units, whole, lower=lower, upper=upper, precision=precision, steps=16, partners=8)

    if capacity is None:
        owners = divided(paces)
    else:
        most = np.minimum(_of_workers("capacity", capacity, workers), given.sum())
        # In proportion to the capacities, if it does not fit otherwise.
        owners = _within(map(divided, (paces, most)), given, most, lower, upper)
    all_own = [np.flatnonzero(owners == each) for each in range(workers)]
    if micro_batch_cost is None:
        return [[own.tolist()] if len(own) else [] for own in all_own]
    limit = float(_of_workers("micro_batch_cost", micro_batch_cost, 1)[0])
    if given.max() > limit:
        raise ConfigError(
            f"item {int(given.argmax())} costs {given.max():g}, and a micro_batch_cost of {limit:g} has no room for it:"
            " give one that the costliest item fits into"
        )
    most = int(limit * per_cost)
    return [[own[each].tolist() for each in (pieces(units[own], most, 1) if len(own) else [])] for own in all_own]


def _within(
    starts: Iterable[IntArray], costs: FloatArray, capacity: FloatArray, lower: IntArray, upper: IntArray
) -> IntArray:
    # Whole numbers, so that all workers divide alike, and as fine as their sum allows; each is rounded by up to a half.
    finest = 60 - len(costs).bit_length() - math.frexp(float(costs.max()))[1]
    memory = np.rint(np.ldexp(costs, finest)).astype(np.int64)
    room = np.rint(np.ldexp(capacity, finest)).astype(np.int64) + len(costs) // 2
    for owners in starts:
        found = fitted(owners, memory, room, lower=lower, upper=upper)
        over = np.flatnonzero(np.bincount(found, weights=memory, minlength=len(room)) > room)
        if not over.size:
            return found
    raise ConfigError(
        f"no division was found in which the items of worker {int(over[0])} cost at most {capacity[over[0]]:g}:"
        " give fewer items, or more capacity"
    )


def _numbers(name: str, values: npt.ArrayLike) -> FloatArray:
    try:
        numbers = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        numbers = np.empty((0, 0))
    if numbers.ndim > 1:
        raise ConfigError(f"{name} must be numbers in one dimension, not {shown(values)}")
    return numbers


def _of_workers(name: str, value: float | Sequence[float], workers: int) -> FloatArray:
    """The value of each worker, of shape [workers]."""
    numbers = _numbers(name, value)
    if numbers.shape not in ((), (workers,)) or not ((numbers > 0) & np.isfinite(numbers)).all():
        many = f" or {workers} of them" if workers > 1 else ""
        raise ConfigError(f"{name} must be a finite number above 0{many}, not {shown(value)}")
    return np.broadcast_to(numbers, (workers,))
