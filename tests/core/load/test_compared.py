"""Iterations with equal sizes, to compare the decided ones with: when they come, what they cost, what they change."""

import numpy as np
import pytest

from evenstep.core.load import Equal, Pairwise, Predicted
from evenstep.core.load.compared import START_ITERATIONS, ComparedPolicy
from evenstep.core.values import UNLIMITED, Problem, Reports
from evenstep.testing.conformance import check_load_policy

NOISE = np.random.default_rng(0).normal(1.0, 0.03, (4, 2000))
LOADS = {"predicted": Predicted(), "ema": Predicted(predictor="ema", times="proportional"), "pairwise": Pairwise()}


def problem(batch, workers, **changes):
    ones = np.ones(workers, dtype=np.int64)
    return Problem(global_batch_size=batch, minimum=ones, maximum=changes.pop("maximum", ones * UNLIMITED), **changes)


def train(load, asked, iterations, seconds, *, compares=True):
    """Each iteration's basis, sizes and longest compute seconds, with workers of seconds(worker, samples, decided)."""
    policy = ComparedPolicy(load.policy(asked.workers)) if compares else load.policy(asked.workers)
    estimators = [load.estimator() for _ in range(asked.workers)]
    done, decided = [], 0
    equal = Equal().policy(asked.workers).allocate(asked).sizes
    for number in range(iterations):
        allocation = policy.allocate(asked)
        start = not compares and number < START_ITERATIONS
        basis, sizes = ("start", equal) if start else (allocation.basis, allocation.sizes)
        times = [seconds(worker, int(size), decided) for worker, size in enumerate(sizes)]
        table = []
        for estimator, size, time in zip(estimators, sizes.tolist(), times, strict=True):
            microseconds = round(time * 1e6)
            if basis != "comparison":
                estimator.observe(size, microseconds / 1e6)
            table.append([size, microseconds, *estimator.estimate(), UNLIMITED])
        policy.observe(Reports.from_table(np.array(table, dtype=np.int64)))
        decided += basis != "comparison"
        done.append((basis, sizes.tolist(), max(times)))
    return done


def one_slow(worker, samples, decided):
    """Time with a fixed part; the last of four workers is half slower, and later not."""
    slowness = 1.5 if worker == 3 and decided < 600 else 1
    return slowness * (0.030 + 0.002 * samples) * NOISE[worker, decided]


def comparisons_of(done):
    """The first iterations of later comparisons."""
    bases = ["", *(basis for basis, _, _ in done)]
    return [k for k in range(len(done)) if bases[k + 1] == "comparison" != bases[k]]


@pytest.mark.parametrize("load", LOADS)
def test_it_is_a_load_policy(load):
    check_load_policy(lambda workers: ComparedPolicy(LOADS[load].policy(workers)))


@pytest.mark.parametrize("load", LOADS)
def test_later_sizes_are_those_without_comparisons(load):
    asked = problem(64, 4)
    done = train(LOADS[load], asked, 700, one_slow)
    plain = [sizes for _, sizes, _ in train(LOADS[load], asked, 700, one_slow, compares=False)]
    decided = [sizes for basis, sizes, _ in done if basis != "comparison"]
    assert len(comparisons_of(done)) >= 2
    assert len(decided) < len(plain)
    assert decided == plain[: len(decided)]


def test_the_first_iterations_are_equal_and_later_comparisons_take_three_each():
    done = train(Predicted(), problem(64, 4), 600, one_slow)
    bases = [basis for basis, _, _ in done]
    assert bases[:6] == ["start"] * 5 + ["speed"]
    starts = comparisons_of(done)
    assert starts
    for start in starts:
        assert bases[start : start + 4] == ["comparison"] * 3 + ["speed"]
    assert all(sizes == [16] * 4 for basis, sizes, _ in done if basis != "speed")


def test_later_comparisons_take_less_than_half_a_per_cent_of_the_time():
    done = train(Predicted(), problem(64, 4), 3000, lambda worker, samples, _: 0.001 * samples * (1, 1, 2, 4)[worker])
    starts = comparisons_of(done)
    usual = done[-1][2]
    cost = sum(seconds - usual for basis, _, seconds in done if basis == "comparison")
    assert len(starts) >= 2
    assert cost <= 0.005 * sum(seconds for _, _, seconds in done)


def test_sizes_that_have_changed_are_soon_compared():
    def later_slow(worker, samples, decided):
        return (3 if worker == 3 and decided >= 500 else 1) * 0.002 * samples

    starts = comparisons_of(train(Predicted(), problem(64, 4), 600, later_slow))
    assert len(starts) == 1
    assert 520 <= starts[0] <= 530


def test_nothing_is_compared_where_sizes_are_nearly_equal_or_cannot_be_equal():
    def nearly(worker, samples, _):
        return (1.0, 1.0, 1.0, 1.05)[worker] * 0.002 * samples

    assert comparisons_of(train(Predicted(), problem(64, 4), 400, nearly)) == []
    limits = np.array([8, 64, 64, 64], dtype=np.int64)
    assert comparisons_of(train(Predicted(), problem(64, 4, maximum=limits), 400, one_slow)) == []
    assert train(Predicted(), problem(16, 1), 10, one_slow)[0][0] == "speed"
