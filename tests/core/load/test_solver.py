from itertools import product
from typing import final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.core.load.shares import Bounds
from evenstep.core.load.solver import Lines, reachable, solve

LARGEST = 12


def ints(values):
    return np.array(values, dtype=np.int64)


@final
class Steps:
    """Any monotone curve: nanoseconds of each size from 0, shape [workers, sizes]; beyond it time is out of reach."""

    def __init__(self, table):
        self.table = ints(table)

    def nanoseconds(self, sizes):
        return self.table[np.arange(len(self.table)), np.minimum(sizes, self.table.shape[1] - 1)]

    def largest(self, nanoseconds):
        return (self.table <= nanoseconds).sum(axis=1) - 1


@final
class Counted:
    """Counts how often the largest sizes are asked for."""

    def __init__(self, times):
        self.times = times
        self.asked = 0

    def nanoseconds(self, sizes):
        return self.times.nanoseconds(sizes)

    def largest(self, nanoseconds):
        self.asked += 1
        return self.times.largest(nanoseconds)


@st.composite
def curves(draw):
    workers = draw(st.integers(1, 3))
    steps = st.lists(st.integers(0, 5), min_size=LARGEST + 4, max_size=LARGEST + 4)
    return Steps([np.cumsum(draw(steps)) for _ in range(workers)])


@st.composite
def affine(draw):
    workers = draw(st.integers(1, 3))

    def column(low, high):
        return ints(draw(st.lists(st.integers(low, high), min_size=workers, max_size=workers)))

    return Lines(fixed=column(0, 60), per_sample=column(1, 20), flat=column(0, 5))


@st.composite
def limits(draw, times):
    workers = len(times.largest(0))
    multiple = draw(st.integers(1, 3))
    lower, sizes, upper = [], [], []
    for _ in range(workers):
        a, b, c = sorted(draw(st.lists(st.integers(0, LARGEST // multiple), min_size=3, max_size=3)))
        lower.append(a * multiple)
        sizes.append(b * multiple)
        upper.append(c * multiple)
    return Bounds.of(sum(sizes), ints(lower), ints(upper), multiple)


def lines(per_sample, fixed=None, flat=None):
    none = [0] * len(per_sample)
    return Lines(per_sample=ints(per_sample), fixed=ints(fixed or none), flat=ints(flat or none))


def unlimited(batch, workers):
    return Bounds.of(batch, ints([1] * workers), ints([10**9] * workers), 1)


def brute_force(times, bounds):
    choices = [range(low, high + 1) for low, high in zip(bounds.lower, bounds.upper, strict=True)]
    return min(
        int(times.nanoseconds(ints(units) * bounds.multiple).max())
        for units in product(*choices)
        if sum(units) == bounds.units
    )


def check_optimal(times, bounds):
    sizes = solve(times, bounds)
    best = brute_force(times, bounds)
    units, rest = np.divmod(sizes, bounds.multiple)
    assert not rest.any()
    assert units.sum() == bounds.units
    assert ((bounds.lower <= units) & (units <= bounds.upper)).all()
    assert times.nanoseconds(sizes).max() == best
    assert reachable(times, bounds, best)
    assert not reachable(times, bounds, best - 1)


@given(st.data())
def test_optimal_on_any_monotone_curves(data):
    times = data.draw(curves())
    check_optimal(times, data.draw(limits(times)))


@given(st.data())
def test_optimal_on_lines_with_a_flat_start(data):
    times = data.draw(affine())
    check_optimal(times, data.draw(limits(times)))


@given(affine(), st.integers(0, 500))
def test_the_largest_size_is_the_last_that_fits(times, nanoseconds):
    largest = times.largest(nanoseconds)
    fits = largest >= 0
    assert (times.nanoseconds(np.maximum(largest, 0))[fits] <= nanoseconds).all()
    assert (times.nanoseconds(np.maximum(largest + 1, 0)) > nanoseconds).all()


def test_time_through_the_origin():
    times = lines([3, 5])
    assert times.proportional
    assert times.nanoseconds(ints([4, 2])).tolist() == [12, 10]
    assert times.largest(14).tolist() == [4, 2]


def test_equal_workers_differ_by_one_multiple_at_most():
    times = lines([10] * 7, fixed=[100] * 7, flat=[16] * 7)
    for batch in (8 * 7, 16 * 7, 16 * 7 + 5, 1000):
        sizes = solve(times, unlimited(batch, 7))
        assert sizes.max() - sizes.min() <= 1


def test_the_closed_form_of_lines():
    # T = (X + sum(a / b)) / sum(1 / b)
    times = lines([10**6, 2 * 10**6], fixed=[10**7, 2 * 10**7])
    assert solve(times, unlimited(100, 2)).tolist() == [70, 30]


def test_where_only_one_answer_is_left():
    times = lines([3, 5])
    assert solve(times, Bounds.of(8, ints([6, 2]), ints([9, 9]), 1)).tolist() == [6, 2]
    assert solve(times, Bounds.of(8, ints([0, 0]), ints([2, 6]), 1)).tolist() == [2, 6]


@pytest.mark.parametrize("seed", range(5))
def test_speeds_far_apart_and_limits_take_few_guesses(seed):
    generator = np.random.default_rng(seed)
    fixed = generator.integers(0, 10**9, 64).tolist()
    times = Counted(lines((np.exp(generator.uniform(0.0, 20.0, 64)).astype(np.int64) + 1).tolist(), fixed))
    bounds = Bounds.of(8000, ints([0] * 64), generator.integers(100, 500, 64), 1)
    sizes = solve(times, bounds)
    makespan = int(times.nanoseconds(sizes).max())
    assert times.asked < 30
    assert reachable(times, bounds, makespan)
    assert not reachable(times, bounds, makespan - 1)


def test_ten_thousand_workers():
    generator = np.random.default_rng(0)
    fixed = generator.integers(0, 10**8, 10_000).tolist()
    times = lines(generator.integers(10**5, 10**7, 10_000).tolist(), fixed)
    bounds = unlimited(640_000, 10_000)
    sizes = solve(times, bounds)
    makespan = int(times.nanoseconds(sizes).max())
    assert sizes.sum() == 640_000
    assert reachable(times, bounds, makespan)
    assert not reachable(times, bounds, makespan - 1)
