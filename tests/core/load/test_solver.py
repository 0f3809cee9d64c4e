from itertools import product
from typing import final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.core.errors import ConfigError
from evenstep.core.load.allocate import reachable, solve
from evenstep.core.load.times import Affine, ThroughOrigin
from evenstep.core.values import Problem

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

    return Affine(fixed_nanoseconds=column(0, 60), nanoseconds_per_sample=column(1, 20), flat_size=column(0, 5))


@st.composite
def problems(draw, times):
    workers = len(times.largest(0))
    multiple = draw(st.integers(1, 3))
    lower, sizes, upper = [], [], []
    for _ in range(workers):
        a, b, c = sorted(draw(st.lists(st.integers(0, LARGEST // multiple), min_size=3, max_size=3)))
        lower.append(a * multiple)
        sizes.append(b * multiple)
        upper.append(c * multiple)
    return Problem(global_batch_size=sum(sizes), minimum=ints(lower), maximum=ints(upper), multiple=multiple)


def brute_force(times, problem):
    choices = [
        range(low, high + 1, problem.multiple) for low, high in zip(problem.minimum, problem.maximum, strict=True)
    ]
    return min(
        int(times.nanoseconds(ints(sizes)).max())
        for sizes in product(*choices)
        if sum(sizes) == problem.global_batch_size
    )


def check_optimal(times, problem):
    sizes = solve(times, problem)
    best = brute_force(times, problem)
    assert sizes.sum() == problem.global_batch_size
    assert ((problem.minimum <= sizes) & (sizes <= problem.maximum)).all()
    assert not (sizes % problem.multiple).any()
    assert times.nanoseconds(sizes).max() == best
    assert reachable(times, problem, best)
    assert not reachable(times, problem, best - 1)


@given(st.data())
def test_optimal_on_any_monotone_curves(data):
    times = data.draw(curves())
    check_optimal(times, data.draw(problems(times)))


@given(st.data())
def test_optimal_on_lines_with_a_flat_start(data):
    times = data.draw(affine())
    check_optimal(times, data.draw(problems(times)))


@given(affine(), st.integers(0, 500))
def test_the_largest_size_is_the_last_that_fits(times, nanoseconds):
    largest = times.largest(nanoseconds)
    fits = largest >= 0
    assert (times.nanoseconds(np.maximum(largest, 0))[fits] <= nanoseconds).all()
    assert (times.nanoseconds(np.maximum(largest + 1, 0)) > nanoseconds).all()


def test_time_through_the_origin():
    times = ThroughOrigin(nanoseconds_per_sample=ints([3, 5]))
    assert times.nanoseconds(ints([4, 2])).tolist() == [12, 10]
    assert times.largest(14).tolist() == [4, 2]


def test_equal_workers_differ_by_one_multiple_at_most():
    times = Affine(fixed_nanoseconds=ints([100] * 7), nanoseconds_per_sample=ints([10] * 7), flat_size=16)
    for batch in (8 * 7, 16 * 7, 16 * 7 + 5, 1000):
        problem = Problem(global_batch_size=batch, minimum=ints([1] * 7), maximum=ints([batch] * 7))
        sizes = solve(times, problem)
        assert sizes.max() - sizes.min() <= 1


def test_the_closed_form_of_lines():
    # T = (X + sum(a / b)) / sum(1 / b)
    times = Affine(fixed_nanoseconds=ints([10**7, 2 * 10**7]), nanoseconds_per_sample=ints([10**6, 2 * 10**6]))
    problem = Problem(global_batch_size=100, minimum=ints([1, 1]), maximum=ints([100, 100]))
    assert solve(times, problem).tolist() == [70, 30]


def test_sizes_that_cannot_be_are_refused():
    times = ThroughOrigin(nanoseconds_per_sample=ints([3, 5]))
    with pytest.raises(ConfigError, match="raise the maximum"):
        solve(times, Problem(global_batch_size=100, minimum=ints([1, 1]), maximum=ints([10, 10])))


def test_ten_thousand_workers():
    generator = np.random.default_rng(0)
    times = Affine(
        fixed_nanoseconds=generator.integers(0, 10**8, 10_000),
        nanoseconds_per_sample=generator.integers(10**5, 10**7, 10_000),
    )
    problem = Problem(global_batch_size=640_000, minimum=np.ones(10_000, np.int64), maximum=np.full(10_000, 10**6))
    sizes = solve(times, problem)
    makespan = int(times.nanoseconds(sizes).max())
    assert sizes.sum() == 640_000
    assert reachable(times, problem, makespan)
    assert not reachable(times, problem, makespan - 1)
