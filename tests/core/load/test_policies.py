from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import evenstep.core.load as load
from evenstep.core.errors import ConfigError
from evenstep.core.load import Equal, Experts, LoadOf, PerEpoch, Static
from evenstep.core.load.pairwise import PairwisePolicy
from evenstep.core.load.time_models import TimeModelsPolicy
from evenstep.core.values import UNLIMITED, Problem, Reports
from evenstep.testing.conformance import check_load_policy

UNDER_TEST = {
    "equal": lambda workers: Equal(),
    "static": lambda workers: Static(sizes=(128 - 8 * (workers - 1),) + (8,) * (workers - 1)),
    "experts": lambda workers: Experts(),
    "the last pace": lambda workers: Experts(predictor="last", change_cost=0.0),
    "experts with narx, at a cost": lambda workers: Experts(predictor="experts+narx", change_cost=0.2),
    "solver": lambda workers: LoadOf(make=TimeModelsPolicy),
    "pairwise": lambda workers: LoadOf(make=PairwisePolicy),
    "per epoch": lambda workers: PerEpoch(),
}


def ints(values):
    return np.array(values, dtype=np.int64)


def problem(batch, workers, **changes):
    whole = Problem(global_batch_size=batch, minimum=ints([1] * workers), maximum=ints([UNLIMITED] * workers))
    return replace(whole, **changes)


def decided(policy, reports_of, batch, paces, **changes):
    """After some iterations, in which each worker needs so many milliseconds for a sample."""
    asked = problem(batch, len(paces), **changes)
    for _ in range(8):
        sizes = policy.allocate(asked).sizes
        policy.observe(reports_of(sizes.tolist(), 1e-3 * sizes * paces))
    return policy.allocate(asked).sizes.tolist()


@pytest.mark.parametrize("name", UNDER_TEST)
@pytest.mark.parametrize("workers", [2, 4, 8])
def test_conforms(name, workers):
    check_load_policy(lambda count: UNDER_TEST[name](count).policy(count), workers=workers)


def test_every_public_load_is_under_test():
    configs = {name for name in load.__all__ if hasattr(getattr(load, name), "policy") and name != "Load"}
    assert configs == {type(UNDER_TEST[name](4)).__name__ for name in UNDER_TEST}


def test_equal_sizes_differ_by_one_at_most():
    assert Equal().policy(4).allocate(problem(10, 4)).sizes.tolist() == [3, 3, 2, 2]


def test_static_sizes_are_the_users():
    assert Static(sizes=(3, 5)).policy(2).allocate(problem(8, 2)).sizes.tolist() == [3, 5]


def test_static_sizes_share_a_short_last_batch():
    assert Static(sizes=(6, 10)).policy(2).allocate(problem(8, 2)).sizes.tolist() == [3, 5]


@pytest.mark.parametrize(
    ("batch", "changes", "message"),
    [
        (9, {}, "add up to 8, not to the global batch size 9"),
        (8, {"maximum": ints([4, 4])}, "from 1 to 4"),
        (8, {"minimum": ints([4, 4])}, "from 4 to"),
    ],
)
def test_static_sizes_that_do_not_fit_are_refused(batch, changes, message):
    with pytest.raises(ConfigError, match=message):
        Static(sizes=(3, 5)).policy(2).allocate(problem(batch, 2, **changes))


def test_static_sizes_for_other_workers_are_refused():
    with pytest.raises(ConfigError, match="sizes for 2 workers"):
        Static(sizes=(3, 5)).policy(3)
    with pytest.raises(ConfigError, match="sizes for 2 workers"):
        Static(sizes=(3, 5)).policy(2).allocate(problem(8, 3))


def test_static_sizes_that_are_not_the_whole_batch_are_refused():
    Static(sizes=(3, 5)).require(2, 8)
    with pytest.raises(ConfigError, match=r"\[3, 5\] add up to 8, not to the global batch size 6: correct one"):
        Static(sizes=(3, 5)).require(2, 6)


@pytest.mark.parametrize("sizes", [(), (0, 0), (4, -1)])
def test_static_sizes_that_are_none_are_refused(sizes):
    with pytest.raises(ConfigError, match="samples"):
        Static(sizes=sizes)


def test_in_proportion_to_speed(reports_of):
    assert decided(Experts().policy(4), reports_of, 256, [4, 4, 2, 1]) == [32, 32, 64, 128]


def test_the_solver_counts_a_fixed_part():
    """Worker 0 takes 10 + x, worker 1 20 + 2 x milliseconds."""
    policy, asked = TimeModelsPolicy(2), problem(100, 2)
    for _ in range(6):
        x = policy.allocate(asked).sizes
        policy.observe(Reports(x, np.array([1000, 2000]) * (10 + x), np.zeros_like(x), np.full_like(x, UNLIMITED)))
    assert policy.allocate(asked).sizes.tolist() == [70, 30]


def test_sizes_that_break_a_new_limit_always_move(reports_of):
    for config in (Experts(change_cost=1e9), Experts(), LoadOf(make=TimeModelsPolicy)):
        policy = config.policy(2)
        assert decided(policy, reports_of, 100, [1, 1]) == [50, 50]
        assert decided(policy, reports_of, 100, [1, 1], maximum=ints([40, 90])) == [40, 60]


@pytest.mark.parametrize(
    "config",
    [Equal(), Static(sizes=(8, 8)), Experts(), LoadOf(make=PairwisePolicy), PerEpoch(), LoadOf(make=TimeModelsPolicy)],
)
def test_every_load_says_its_limits(config):
    assert (config.minimum, config.maximum, config.multiple) == (None, None, 1)


PACES = st.lists(st.integers(1, 10**4), min_size=1, max_size=10)
LOADS = st.sampled_from([Experts(), Experts(predictor="last"), LoadOf(make=TimeModelsPolicy)])


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(LOADS, PACES, st.integers(0, 500))
def test_never_slower_than_equal_sizes(reports_of, load, paces, extra):
    workers = len(paces)
    sizes = ints(decided(load.policy(workers), reports_of, workers + extra, paces))
    equal = Equal().policy(workers).allocate(problem(workers + extra, workers)).sizes
    assert (ints(paces) * sizes).max() <= (ints(paces) * equal).max()


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(PACES, st.integers(0, 500), st.integers(2, 50))
def test_only_ratios_of_speeds_count(reports_of, paces, extra, factor):
    batch = len(paces) + extra
    one = decided(Experts().policy(len(paces)), reports_of, batch, paces)
    other = decided(Experts().policy(len(paces)), reports_of, batch, [factor * pace for pace in paces])
    # Equal remainders may fall to another worker.
    assert np.abs(ints(one) - ints(other)).max() <= 1


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(LOADS, PACES, st.integers(0, 500))
def test_a_faster_worker_never_gets_less(reports_of, load, paces, extra):
    sizes = decided(load.policy(len(paces)), reports_of, len(paces) + extra, paces)
    for pace, size in zip(paces, sizes, strict=True):
        for slower, smaller in zip(paces, sizes, strict=True):
            assert smaller <= size + 1 or slower <= pace
