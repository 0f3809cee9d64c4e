"""evenstep.balance: every item once, all workers finished together, and nothing above its limit."""

import numpy as np
import pytest
from balance import differencing
from hypothesis import given
from hypothesis import strategies as st

import evenstep
from evenstep import ConfigError

COSTS = st.lists(st.floats(0.1, 1e6), min_size=1, max_size=60)


def seconds(parts, costs, speeds):
    return [sum(costs[item] for own in part for item in own) / speed for part, speed in zip(parts, speeds, strict=True)]


@given(COSTS, st.lists(st.floats(0.01, 100), min_size=1, max_size=8), st.booleans(), st.floats(1, 5) | st.none())
def test_every_item_has_one_worker_and_a_micro_batch_that_is_not_too_large(costs, speeds, equal_counts, times):
    limit = None if times is None else times * max(costs)
    parts = evenstep.balance(costs, len(speeds), speeds=speeds, equal_counts=equal_counts, micro_batch_cost=limit)
    assert sorted(item for part in parts for own in part for item in own) == list(range(len(costs)))
    counts = [sum(map(len, part)) for part in parts]
    assert min(counts) >= 1 or len(costs) < len(speeds)
    assert not equal_counts or max(counts) - min(counts) <= 1
    for own in (own for part in parts for own in part):
        assert own == sorted(own) != []
        assert limit is None or sum(costs[item] for item in own) <= limit * (1 + 1e-8)
    assert parts == evenstep.balance(
        np.array(costs), len(speeds), speeds=speeds, equal_counts=equal_counts, micro_batch_cost=limit
    )


@pytest.mark.parametrize("spread", [0.5, 1.0, 1.5])
@pytest.mark.parametrize(("items", "workers"), [(64, 16), (96, 8), (256, 32), (1024, 16)])
def test_lognormal_lengths_end_as_early_as_by_differencing_and_within_three_per_cent_with_speeds(
    items, workers, spread
):
    costs = np.clip(np.random.default_rng(0).lognormal(7, spread, items), 16, 32768).astype(int)
    latest = max(seconds(evenstep.balance(costs, workers), costs, [1] * workers))
    assert latest <= differencing(costs.tolist(), workers) * (1 + 1e-4)
    speeds = np.resize([1, 1, 2, 4], workers)
    latest = max(seconds(evenstep.balance(costs, workers, speeds=speeds), costs, speeds))
    assert latest <= 1.03 * max(costs.sum() / speeds.sum(), costs.max() / speeds.max())


def test_no_worker_gets_more_than_its_capacity():
    costs = [5, 5, 5, 5, 2, 2, 2, 2]
    parts = evenstep.balance(costs, 2, speeds=[3, 1], capacity=[14, 30])
    assert seconds(parts, costs, [1, 1])[0] <= 14
    with pytest.raises(ConfigError, match="no division was found in which the items of worker 1 cost at most 24: give"):
        evenstep.balance(costs, 2, capacity=[3, 24])


@pytest.mark.parametrize(
    ("costs", "options"),
    [
        ([10, 10, 1, 1], {"speeds": [10, 1], "equal_counts": True, "capacity": 12}),  # Two are exchanged.
        ([1, 2, 3, 4], {"capacity": [3, 8]}),
        ([30, 8, 7, 5, 3, 2, 2, 2, 1], {"speeds": [5, 5], "capacity": [21, 42]}),  # Begun in proportion to capacity.
    ],
)
def test_what_fits_only_after_exchanges_is_found(costs, options):
    parts = evenstep.balance(costs, 2, **options)
    assert (np.array(seconds(parts, costs, [1, 1])) <= options["capacity"]).all()


def test_a_capacity_that_just_holds_everything_does():
    for costs in ([0.1] * 10, [0.1] * 7 + [0.3], [3, 3, 3, 1.1, 0.7]):
        assert evenstep.balance(costs, 1, capacity=sum(costs)) == [[[*range(len(costs))]]]
    assert evenstep.balance([0.3, 0.7], 2, capacity=1e300) == evenstep.balance([0.3, 0.7], 2)


def test_no_items_are_no_parts_and_few_items_leave_workers_without():
    assert evenstep.balance([], 2) == [[], []]
    assert sorted(evenstep.balance([3, 4], 3)) == [[], [[0]], [[1]]]


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([1, 2], 0), {}, "workers must be a whole number from 1 to"),
        (([1, -2], 2), {}, "the cost of item 1 is -2.0: give each item a finite number above 0"),
        ((5, 2), {}, "costs must be one number for each item, not 5"),
        (([[1], [2]], 2), {}, "costs must be numbers in one dimension, not"),
        ((["long"], 2), {}, "costs must be numbers in one dimension, not"),
        (([1, 2], 2), {"speeds": [1]}, "speeds must be a finite number above 0 or 2 of them, not"),
        (([1, 2], 2), {"speeds": [1, 0]}, "speeds must be a finite number above 0 or 2 of them, not"),
        (([1, 2], 2), {"capacity": "much"}, "capacity must be numbers in one dimension, not 'much'"),
        (([1, 9], 2), {"micro_batch_cost": 8}, "item 1 costs 9, and a micro_batch_cost of 8 has no room for it"),
    ],
)
def test_wrong_arguments_are_refused(arguments, options, message):
    with pytest.raises(ConfigError, match=message):
        evenstep.balance(*arguments, **options)
