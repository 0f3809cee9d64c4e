from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.core.errors import ConfigError
from evenstep.core.load.shares import in_multiples, share_out, shares
from evenstep.core.values import Problem

FREE = 10**9


def ints(values):
    return np.array(values, dtype=np.int64)


def free_shares(total, weights):
    return shares(total, ints(weights), lower=ints([0] * len(weights)), upper=ints([FREE] * len(weights))).tolist()


@st.composite
def bounded(draw):
    """A feasible problem: bounds around sizes that exist."""
    multiple = draw(st.integers(1, 4))
    rows = draw(
        st.lists(
            st.tuples(st.integers(0, 30), st.integers(0, 9), st.integers(0, 9), st.integers(0, 10**12)),
            min_size=1,
            max_size=8,
        )
    )
    sizes, down, up, weights = (ints(column) for column in zip(*rows, strict=True))
    lower, upper = np.maximum(sizes - down, 0) * multiple, (sizes + up) * multiple
    return int(sizes.sum()) * multiple, weights, lower, upper, multiple


def test_the_case_printed_with_dbs():
    assert free_shares(64, [137, 165, 196, 142]) == [14, 16, 20, 14]


def test_largest_remainders_below_one_half_count_too():
    assert free_shares(10, [1, 1, 1]) == [4, 3, 3]


def test_ties_go_to_the_lowest_index():
    assert free_shares(5, [7, 7, 7]) == [2, 2, 1]


def test_weights_of_zero_count_as_equal_where_all_are():
    assert free_shares(7, [0, 0, 0]) == [3, 2, 2]
    assert free_shares(6, [0, 5, 0]) == [0, 6, 0]


def test_what_a_limit_takes_goes_to_the_others_in_proportion():
    sizes = shares(100, ints([4, 2, 1, 1]), lower=ints([0, 0, 0, 20]), upper=ints([30, 99, 99, 99]))
    assert sizes.tolist() == [30, 33, 17, 20]


def test_multiples():
    sizes = shares(64, ints([1, 1, 2]), lower=ints([1, 1, 1]), upper=ints([FREE] * 3), multiple=8)
    assert sizes.tolist() == [16, 16, 32]


def test_weights_beyond_64_bits_in_their_products():
    assert free_shares(1024, [2**62, 2**62, 2**61, 1]) == [410, 409, 205, 0]


@given(bounded())
def test_sums_exactly_within_limits_and_in_multiples(problem):
    total, weights, lower, upper, multiple = problem
    sizes = shares(total, weights, lower=lower, upper=upper, multiple=multiple)
    assert sizes.sum() == total
    assert (sizes >= lower).all()
    assert (sizes <= upper).all()
    assert not (sizes % multiple).any()


@given(st.integers(0, 10**6), st.lists(st.integers(1, 10**9), min_size=1, max_size=12))
def test_every_share_is_its_quota_rounded_up_or_down(total, weights):
    whole = sum(weights)
    for size, weight in zip(free_shares(total, weights), weights, strict=True):
        assert total * weight // whole <= size <= -(-total * weight // whole)


@given(st.integers(0, 1000), st.lists(st.integers(1, 1000), min_size=1, max_size=8), st.integers(1, 1000))
def test_only_ratios_of_weights_count(total, weights, factor):
    assert free_shares(total, weights) == free_shares(total, [factor * weight for weight in weights])


@given(
    st.integers(0, 500), st.lists(st.integers(1, 1000), min_size=2, max_size=8), st.integers(0, 9), st.integers(0, 9)
)
def test_a_larger_weight_never_gets_less_at_equal_limits(total, weights, least, more):
    workers = len(weights)
    lower = min(least, total // workers)
    upper = -(-total // workers) + more
    sizes = shares(total, ints(weights), lower=ints([lower] * workers), upper=ints([upper] * workers))
    order = np.argsort(weights, kind="stable")
    heavier = np.diff(ints(weights)[order]) > 0
    assert (np.diff(sizes[order])[heavier] >= 0).all()


@given(bounded(), st.randoms(use_true_random=False))
def test_the_order_of_workers_counts_only_in_ties(problem, random):
    total, weights, lower, upper, multiple = problem
    order = list(range(len(weights)))
    random.shuffle(order)
    sizes = shares(total, weights, lower=lower, upper=upper, multiple=multiple)
    shuffled = shares(total, weights[order], lower=lower[order], upper=upper[order], multiple=multiple)
    assert np.abs(sizes[order] - shuffled).max() <= multiple


@given(bounded())
def test_in_least_time_nobody_could_take_a_unit_from_the_slowest(problem):
    total, weights, lower, upper, multiple = problem
    speeds = np.maximum(weights, 1)
    limits = in_multiples(Problem(global_batch_size=total, minimum=lower, maximum=upper, multiple=multiple))
    sizes = share_out(limits, speeds, in_least_time=True)
    assert sizes.sum() == total
    assert ((lower <= sizes) & (sizes <= upper)).all()
    assert not (sizes % multiple).any()
    least = max([0.0, *((sizes / speeds)[sizes > lower])])
    assert ((sizes + multiple) / speeds)[sizes < upper].min(initial=np.inf) >= least * (1 - 1e-12)


def test_one_batch_more_costs_a_slow_worker_most():
    limits = in_multiples(Problem(global_batch_size=24, minimum=ints([1, 1, 1]), maximum=ints([FREE] * 3), multiple=1))
    assert share_out(limits, ints([40, 40, 10]), in_least_time=True).tolist() == [11, 11, 2]
    assert share_out(replace(limits, global_batch_size=8), ints([10, 10, 40]), in_least_time=True).tolist() == [1, 1, 6]


@pytest.mark.parametrize(
    ("total", "lower", "upper", "multiple", "message"),
    [
        (4, [3, 3], [9, 9], 1, "lower the minimum sizes"),
        (20, [0, 0], [9, 9], 1, "raise the maximum sizes"),
        (9, [0, 0], [9, 9], 2, "not a multiple of 2"),
        (8, [5, 0], [4, 9], 1, "worker 0 has no size"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(total, lower, upper, multiple, message):
    with pytest.raises(ConfigError, match=message) as refused:
        shares(total, ints([1, 1]), lower=ints(lower), upper=ints(upper), multiple=multiple)
    assert "\n" not in str(refused.value)


def test_negative_weights_are_refused():
    with pytest.raises(ConfigError, match="negative"):
        free_shares(4, [1, -1])


def test_ten_thousand_workers_with_limits_on_every_side():
    generator = np.random.default_rng(0)
    weights = generator.integers(1, 10**6, 10_000)
    lower = generator.integers(0, 20, 10_000)
    upper = lower + generator.integers(0, 60, 10_000)
    sizes = shares(320_000, weights, lower=lower, upper=upper)
    assert sizes.sum() == 320_000
    assert ((lower <= sizes) & (sizes <= upper)).all()
