"""How the experts are weighed, when sizes change, and what becomes of workers that say nothing, come or go."""

import json
from itertools import pairwise

import numpy as np
import pytest

from evenstep.core.errors import ConfigError
from evenstep.core.load import Averages, Even, Expert, Experts
from evenstep.core.load.expert import Forecasts
from evenstep.core.values import UNLIMITED, Problem
from evenstep.testing.conformance import check_expert

UNDER_TEST = {
    "averages": Averages,
    "last": lambda workers: Averages(workers, weights=(1.0,)),
    "even": Even,
    "forecasts": Forecasts,
}


def problem(workers, batch=None):
    ones = np.ones(workers, dtype=np.int64)
    return Problem(global_batch_size=batch or 100 * workers, minimum=ones, maximum=ones * UNLIMITED)


def fed(policy, reports_of, paces, iterations=5, batch=None):
    """The sizes after iterations in which workers take `paces` for a sample; None: it reports nothing."""
    asked = problem(len(paces), batch)
    for _ in range(iterations):
        sizes = policy.allocate(asked).sizes
        samples = [0 if pace is None else int(x) for pace, x in zip(paces, sizes, strict=True)]
        policy.observe(reports_of(samples, [1e-3 * x * (pace or 0) for pace, x in zip(paces, samples, strict=True)]))
    return policy.allocate(asked).sizes.tolist()


@pytest.mark.parametrize("name", UNDER_TEST)
@pytest.mark.parametrize("workers", [2, 5])
def test_experts_conform(name, workers):
    check_expert(UNDER_TEST[name], workers=workers)


def test_an_expert_that_is_right_outweighs_the_others(reports_of):
    class Right(Even):
        def speeds(self):
            return np.array([3.0, 1.0])

    class Wrong(Even):
        def speeds(self):
            return np.array([1.0, 3.0])

    policy = Experts(experts=(Wrong, Right), change_cost=0.0).policy(2)
    assert fed(policy, reports_of, [1.0, 3.0], 20) == [150, 50]


def test_a_user_s_expert_that_is_wrong_is_refused_by_name(reports_of):
    class Negative(Even):
        def speeds(self):
            return np.array([1.0, -1.0])

    class OfOne(Even):
        def speeds(self):
            return np.array([1.0])

    for expert in (Negative, OfOne):
        policy = Experts(experts=(expert,)).policy(2)
        with pytest.raises(ConfigError, match=f"expert {expert.__name__} gave"):
            fed(policy, reports_of, [1.0, 1.0])


def test_an_expert_without_memory_may_be_all_that_a_user_writes(reports_of):
    class ByRank(Expert):
        def __init__(self, workers):
            self.workers = workers

        def speeds(self):
            return np.arange(1.0, self.workers + 1.0)

    assert fed(Experts(experts=(ByRank,), change_cost=0.0).policy(3), reports_of, [1.0] * 3) == [50, 100, 150]


def test_a_worker_that_reports_nothing_keeps_its_speed(reports_of):
    policy = Experts().policy(3)
    assert fed(policy, reports_of, [1.0, 1.0, 4.0], 10) == [134, 133, 33]
    sizes = fed(policy, reports_of, [2.0, 2.0, None], 30)
    assert sizes[2] == pytest.approx(300 / 5, abs=2)


def test_sizes_are_equal_until_every_worker_is_known(reports_of):
    assert fed(Experts().policy(3), reports_of, [1.0, None, 4.0]) == [100, 100, 100]


def test_a_worker_that_comes_counts_as_the_median_until_it_has_reported(reports_of):
    before = Experts().policy(3)
    fed(before, reports_of, [1.0, 2.0, 4.0], 10)
    after = Experts().policy(3)
    after.recall([(before, 0), None, (before, 2)])
    sizes = after.allocate(problem(3)).sizes
    assert sizes[0] > 2 * sizes[2]
    assert sizes[2] < sizes[1] < sizes[0]
    # Its first iteration is a warm-up.
    after.observe(reports_of(sizes.tolist(), [sizes[0] * 1e-3, 10.0, sizes[2] * 4e-3]))
    assert after.allocate(problem(3)).sizes.tolist() == pytest.approx(sizes.tolist(), abs=2)
    assert fed(after, reports_of, [1.0, 1.0, 4.0], 5) == pytest.approx([134, 133, 33], abs=3)


def test_workers_that_leave_change_nothing_of_the_others_shares(reports_of):
    before = Experts().policy(3)
    fed(before, reports_of, [1.0, 2.0, 4.0], 10)
    after = Experts().policy(2)
    after.recall([(before, 2), (before, 0)])
    assert after.allocate(problem(2)).sizes.tolist() == pytest.approx([40, 160], abs=1)


def test_what_was_known_of_no_worker_is_no_start(reports_of):
    policy = Experts().policy(2)
    policy.recall([None, None])
    assert policy.allocate(problem(2)).basis == "start"


def test_short_slices_and_other_batches_are_shared_out_by_the_same_speeds(reports_of):
    policy = Experts().policy(2)
    fed(policy, reports_of, [1.0, 3.0], 10)
    assert policy.allocate(problem(2, 40)).sizes.tolist() == [30, 10]
    assert policy.allocate(problem(2, 400)).sizes.tolist() == [300, 100]


def test_limits_that_bind_do_not_count_as_a_gain_that_was_missed(reports_of):
    """A worker that could do more than its memory holds would make every other proposal look better."""
    load = Experts(change_cost=0.5)
    policy, ones = load.policy(3), np.ones(3, dtype=np.int64)
    asked = Problem(global_batch_size=300, minimum=ones, maximum=np.array([110, UNLIMITED, UNLIMITED]))
    generator, seen = np.random.default_rng(0), []
    for _ in range(200):
        sizes = policy.allocate(asked).sizes
        seen.append(sizes.tolist())
        paces = np.array([1.0, 4.0, 4.0]) * np.exp(generator.normal(0.0, 0.02, 3))
        policy.observe(reports_of(sizes.tolist(), 1e-3 * sizes * paces))
    assert all(sizes[0] <= 110 for sizes in seen)
    assert sum(one != other for one, other in pairwise(seen[20:])) <= 5


@pytest.mark.parametrize("predictor", ["experts", "experts+narx", "ema", "last", "narx"])
def test_it_resumes_bit_for_bit(reports_of, predictor):
    generator, load = np.random.default_rng(0), Experts(predictor=predictor)
    one, asked = load.policy(3), problem(3)
    for _ in range(40):
        other = load.policy(3)
        other.load_state_dict(json.loads(json.dumps(one.state_dict(), allow_nan=False)))
        sizes = one.allocate(asked).sizes
        assert sizes.tolist() == other.allocate(asked).sizes.tolist()
        reports = reports_of(sizes.tolist(), 1e-3 * sizes * generator.uniform(1.0, 3.0, 3))
        for policy in (one, other):
            policy.observe(reports._replace(forecast=sizes))
        assert one.state_dict() == other.state_dict()


def test_extreme_times_neither_stop_nor_overflow_it(reports_of):
    policy, asked = Experts().policy(2), problem(2)
    for seconds in ([1e-6, 9e9], [9e9, 1e-6], [1e-6, 1e-6], [9e9, 9e9], [1e-6, 9e9]):
        for _ in range(3):
            sizes = policy.allocate(asked).sizes
            assert sizes.sum() == 200
            assert (sizes > 0).all()
            policy.observe(reports_of(sizes.tolist(), seconds))


@pytest.mark.parametrize(
    "wrong",
    [
        {"predictor": "oracle"},
        {"multiple": 0},
        {"warmup": -1},
        {"change_cost": -0.1},
        {"change_cost": float("nan")},
        {"discount": 1.0},
        {"steepness": 0.0},
    ],
)
def test_settings_that_cannot_work_are_refused(wrong):
    with pytest.raises(ConfigError):
        Experts(**wrong)


def test_weights_that_are_none_are_refused():
    with pytest.raises(ConfigError, match="0 < weight"):
        Averages(2, weights=(0.0,))
