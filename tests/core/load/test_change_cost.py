"""What a change of sizes costs, as it is measured, and that sizes change when they have paid for it."""

import json

import numpy as np
import pytest

from evenstep.core.load import Experts
from evenstep.core.load.change_cost import ChangeCost

SPEEDS = np.array([1.0, 1.0, 2.0, 4.0])


def compiled(cost, factors):
    """Seconds of a worker that compiles for each new size, which takes `cost` iterations of 0.1 s."""
    seen = [set() for _ in SPEEDS]

    def seconds(worker, k, size):
        new = size not in seen[worker]
        seen[worker].add(size)
        return 0.1 * size / 64 * factors[k, worker] + 0.1 * cost * new

    return seconds


def changes(sizes):
    return int((np.diff(sizes, axis=0) != 0).any(axis=1).sum())


def fed(cost, *rows):
    for samples, microseconds in rows:
        cost.observe(np.array(samples), np.array(microseconds))
    return cost


@pytest.mark.parametrize("cost", [5.0, 20.0])
@pytest.mark.parametrize("level", [0.02, 0.1])
def test_where_a_change_is_dear_few_are_made_and_they_pay(run, noise, cost, level):
    for seed in range(3):
        factors = noise(level, seed, (200, 4)) * SPEEDS
        sizes, times = run(4, 256, 200, compiled(cost, factors))
        _, equal = run(4, 256, 200, compiled(cost, factors), load=Experts(change_cost=1e9))
        assert 1 <= changes(sizes) <= 4
        assert times.max(axis=1).sum() < 0.85 * equal.max(axis=1).sum()


@pytest.mark.parametrize("cost", [5.0, 20.0])
def test_equal_workers_pay_for_one_change_at_most(run, noise, cost):
    for seed in range(5):
        sizes, _ = run(4, 256, 200, compiled(cost, noise(0.05, seed, (200, 4))))
        assert changes(sizes) <= 1


@pytest.mark.parametrize("level", [0.0, 0.02, 0.1, 0.2])
def test_noise_is_not_taken_for_a_cost(run, noise, level):
    """Sizes follow from the first measured iteration on, as they do where a change is known to be free."""
    ratios = []
    for seed in range(5):
        factors = noise(level, seed, (200, 4)) * SPEEDS
        factors[100:, 0] *= 3.0
        seconds = lambda i, k, x, f=factors: 0.1 * x / 64 * f[k, i]  # noqa: E731
        measured, free = (
            run(4, 256, 200, seconds, load=load)[1].max(axis=1).sum() for load in (Experts(), Experts(change_cost=0.0))
        )
        ratios.append(measured / free)
    assert np.mean(ratios) <= 1.01


def test_the_cost_is_the_excess_of_the_first_iteration_over_the_second_at_the_same_sizes():
    equal, other = [50, 50], [60, 40]
    cost = fed(
        ChangeCost(noise=0.0), (equal, [900, 900]), (equal, [100, 100]), (other, [1280, 1270]), (other, [80, 70])
    )
    assert cost.iterations == pytest.approx(15.0)


def test_the_first_iteration_of_a_process_is_no_change():
    cost = fed(ChangeCost(), ([50, 50], [900, 900]), ([50, 50], [100, 100]))
    assert cost.iterations == 0.0
    assert not cost.known


def test_a_first_iteration_that_costs_nothing_says_that_a_change_costs_nothing():
    assert fed(ChangeCost(), ([50, 50], [105, 100]), ([50, 50], [100, 100])).known


def test_a_slowdown_of_one_worker_that_ends_is_no_cost():
    rows = [([50, 50], [900, 900]), ([50, 50], [100, 100]), ([60, 40], [120, 320]), ([60, 40], [120, 80])]
    assert fed(ChangeCost(noise=0.0), *rows).iterations == 0.0


def test_sizes_that_were_used_before_are_not_measured_again():
    cost = fed(ChangeCost(noise=0.0), ([50, 50], [100, 100]), ([60, 40], [1000, 1000]), ([60, 40], [100, 100]))
    found = cost.iterations
    fed(cost, ([50, 50], [100, 100]), ([50, 50], [100, 100]), ([60, 40], [90, 90]), ([60, 40], [90, 90]))
    assert cost.iterations == found > 5


def test_only_workers_whose_own_size_is_new_are_compared():
    """As where a compiler has compiled the other workers' sizes already."""
    cost = fed(ChangeCost(noise=0.0), ([50, 50, 50], [100, 100, 100]), ([60, 50, 40], [1000, 100, 1000]))
    fed(cost, ([60, 50, 40], [100, 100, 100]), ([60, 30, 60], [100, 900, 900]), ([60, 30, 60], [100, 100, 100]))
    found = cost.iterations
    fed(cost, ([60, 50, 40], [100, 100, 100]), ([50, 30, 70], [100, 100, 900]), ([50, 30, 70], [100, 100, 100]))
    assert found > 5
    assert cost.iterations > 5


def test_slowness_that_returns_finds_its_sizes(run, noise):
    factors = noise(0.02, 0, (400, 4))
    slow = np.arange(400) // 25 % 4 == 1
    factors[slow, 3] *= 4.0
    sizes, times = run(4, 256, 400, compiled(8.0, factors))
    _, equal = run(4, 256, 400, compiled(8.0, factors), load=Experts(change_cost=1e9))
    assert len({tuple(each) for each in sizes[200:].tolist()}) <= 3
    assert (sizes[slow, 3][-20:] < 32).all()
    assert (np.abs(sizes[~slow][-20:] - 64) < 8).all()
    assert times.max(axis=1).sum() < 0.75 * equal.max(axis=1).sum()


def test_a_given_cost_is_not_measured(run, noise):
    factors = noise(0.02, 0, (60, 4)) * SPEEDS
    sizes, _ = run(4, 256, 60, lambda i, k, x: 0.1 * x / 64 * factors[k, i], load=Experts(change_cost=3.0))
    first = np.flatnonzero((sizes != 64).any(axis=1))[0]
    # The best sizes take 0.36 of the time of equal ones, so 5 iterations save 3, the first of which is no warm-up.
    assert first == 6


def test_it_resumes_bit_for_bit(noise):
    generator = np.random.default_rng(0)
    one = ChangeCost()
    for k in range(60):
        samples = np.array([50 + k // 3 % 5, 50 - k // 3 % 5])
        other = ChangeCost()
        other.load_state_dict(json.loads(json.dumps(one.state_dict())))
        assert other.state_dict() == one.state_dict()
        fed(one, (samples, generator.integers(80, 120, 2)))
