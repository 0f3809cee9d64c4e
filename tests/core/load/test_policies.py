import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import evenstep.core.load as load
from evenstep.core.errors import ConfigError
from evenstep.core.load import Chosen, Equal, Pairwise, PerEpoch, Predicted, Static
from evenstep.core.values import UNLIMITED, Problem, Reports
from evenstep.testing.conformance import check_load_policy

UNDER_TEST = {
    "equal": lambda workers: Equal(),
    "static": lambda workers: Static(sizes=(128 - 8 * (workers - 1),) + (8,) * (workers - 1)),
    "predicted": lambda workers: Predicted(),
    "predicted without hysteresis": lambda workers: Predicted(min_gain=0.0, times="proportional", predictor="last"),
    "pairwise": lambda workers: Pairwise(),
    "per epoch": lambda workers: PerEpoch(),
    "chosen": lambda workers: Chosen(),
}


def ints(values):
    return np.array(values, dtype=np.int64)


def problem(batch, workers, **changes):
    whole = Problem(global_batch_size=batch, minimum=ints([1] * workers), maximum=ints([UNLIMITED] * workers))
    return replace(whole, **changes)


def reports(per_sample, fixed=None, error_ppm=0, measured=None):
    """An iteration of these speeds, or of those `measured`, that is long enough to be a block of its own."""
    workers, samples = len(per_sample), 10**5
    fixed = ints(fixed or [0] * workers)
    return Reports(
        samples=ints([samples] * workers),
        compute_microseconds=np.maximum(ints(measured or per_sample) * samples + fixed, 1000) // 1000,
        nanoseconds_per_sample=ints(per_sample),
        fixed_nanoseconds=fixed,
        error_ppm=ints([error_ppm] * workers),
        flat_size=ints([0] * workers),
        largest_size=ints([UNLIMITED] * workers),
    )


def decided(policy, batch, per_sample, fixed=None, error_ppm=0, measured=None, **changes):
    policy.observe(reports(per_sample, fixed, error_ppm, measured))
    return policy.allocate(problem(batch, len(per_sample), **changes)).sizes.tolist()


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
    with pytest.raises(ConfigError, match="2 batch sizes"):
        Static(sizes=(3, 5)).policy(3)
    with pytest.raises(ConfigError, match="2 batch sizes"):
        Static(sizes=(3, 5)).policy(2).allocate(problem(8, 3))


def test_static_sizes_that_are_not_the_whole_batch_are_refused():
    Static(sizes=(3, 5)).require(2, 8)
    with pytest.raises(ConfigError, match=r"\[3, 5\] add up to 8, not to the global batch size 6: correct one"):
        Static(sizes=(3, 5)).require(2, 6)


@pytest.mark.parametrize("sizes", [(), (0, 0), (4, -1)])
def test_static_sizes_that_are_none_are_refused(sizes):
    with pytest.raises(ConfigError, match="samples"):
        Static(sizes=sizes)


@pytest.mark.parametrize(
    "wrong",
    [{"predictor": "oracle"}, {"times": "cubic"}, {"multiple": 0}, {"warmup": -1}, {"min_gain": 1.0}],
)
def test_settings_that_cannot_work_are_refused(wrong):
    with pytest.raises(ConfigError):
        Predicted(**wrong)


def test_sizes_are_equal_until_every_worker_is_known():
    policy = Predicted().policy(3)
    assert policy.allocate(problem(30, 3)).sizes.tolist() == [10, 10, 10]
    assert decided(policy, 30, [100, 0, 300]) == [10, 10, 10]


def test_in_proportion_to_speed_without_fixed_parts():
    assert decided(Predicted().policy(4), 256, [4000, 4000, 2000, 1000]) == [32, 32, 64, 128]


def test_the_solver_with_fixed_parts():
    sizes = decided(Predicted().policy(2), 100, [10**6, 2 * 10**6], [10**7, 2 * 10**7])
    assert sizes == [70, 30]


def test_a_gain_within_the_error_moves_nothing():
    policy = Predicted().policy(2)
    assert decided(policy, 100, [1000, 1000]) == [50, 50]
    assert decided(policy, 100, [1000, 1200], error_ppm=60_000) == [50, 50]
    assert decided(policy, 100, [1000, 1200], error_ppm=25_000) == [55, 45]


def test_a_gain_below_the_least_moves_nothing():
    policy = Predicted(min_gain=0.05).policy(2)
    assert decided(policy, 100, [1000, 1000]) == [50, 50]
    assert decided(policy, 100, [1000, 1080]) == [50, 50]
    assert decided(policy, 100, [1000, 1150]) == [53, 47]


@pytest.mark.parametrize(
    ("load", "sizes"),
    [
        (Predicted(), [50, 50]),
        (Predicted(times="proportional"), [50, 50]),
        (Predicted(min_gain=0.0), [55, 45]),
        (Predicted(predictor="ema", times="proportional"), [55, 45]),
    ],
)
def test_a_gain_that_no_iteration_shows_moves_nothing_by_default(load, sizes):
    policy = load.policy(2)
    for estimated in ([1000, 1000], [1000, 1200]):
        for _ in range(20):
            measured = reports(estimated, error_ppm=25_000)._replace(compute_microseconds=ints([100, 100]))
            policy.observe(measured)
        decision = policy.allocate(problem(100, 2)).sizes.tolist()
    assert decision == sizes


def test_sizes_that_break_a_new_limit_always_move():
    policy = Predicted().policy(2)
    assert decided(policy, 100, [1000, 1000], error_ppm=500_000) == [50, 50]
    assert decided(policy, 100, [1000, 1000], error_ppm=500_000, maximum=ints([40, 90])) == [40, 60]


def test_an_epochs_last_slice_does_not_disturb_the_others():
    policy = Predicted().policy(2)
    assert decided(policy, 100, [1000, 3000]) == [75, 25]
    assert decided(policy, 10, [1000, 2900], error_ppm=400_000) == [7, 3]
    assert decided(policy, 100, [1000, 2900], error_ppm=400_000) == [75, 25]


def test_another_number_of_workers_starts_equal_again():
    policy = Predicted().policy(2)
    assert decided(policy, 90, [1000, 2000]) == [60, 30]
    resumed = Predicted().policy(3)
    resumed.load_state_dict(json.loads(json.dumps(policy.state_dict())))
    assert resumed.allocate(problem(90, 3)).sizes.tolist() == [30, 30, 30]
    assert decided(resumed, 90, [1000, 2000, 2000]) == [45, 23, 22]


@pytest.mark.parametrize("config", [Equal(), Static(sizes=(8, 8)), Predicted(), Pairwise(), PerEpoch()])
def test_every_load_makes_estimators_and_says_its_limits(config):
    estimator = config.estimator()
    for _ in range(3):
        estimator.observe(100, 0.1)
    assert estimator.estimate().nanoseconds_per_sample == 1_000_000
    assert (config.minimum, config.maximum, config.multiple) == (None, None, 1)


RATES = st.lists(st.integers(10**3, 10**9), min_size=1, max_size=10)


@given(RATES, st.integers(0, 500), st.booleans())
def test_never_slower_than_equal_sizes(per_sample, extra, with_fixed):
    workers = len(per_sample)
    fixed = [rate * (i % 3) * 7 for i, rate in enumerate(per_sample)] if with_fixed else [0] * workers
    policy = Predicted().policy(workers)
    equal = policy.allocate(problem(workers + extra, workers)).sizes
    sizes = ints(decided(policy, workers + extra, per_sample, fixed))
    makespan = lambda x: (ints(fixed) + ints(per_sample) * x).max()  # noqa: E731
    assert makespan(sizes) <= makespan(equal)


@given(RATES, st.integers(0, 500), st.integers(2, 50))
def test_only_ratios_of_speeds_count(per_sample, extra, factor):
    batch = len(per_sample) + extra
    scaled = [factor * rate for rate in per_sample]
    one, other = (Predicted().policy(len(per_sample)) for _ in range(2))
    # Speeds are whole numbers, so that equal remainders may fall to another worker.
    differ = ints(decided(one, batch, per_sample)) - ints(decided(other, batch, scaled))
    assert np.abs(differ).max() <= 1


@given(RATES, st.integers(0, 500))
def test_a_faster_worker_never_gets_less(per_sample, extra):
    sizes = decided(Predicted().policy(len(per_sample)), len(per_sample) + extra, per_sample)
    for rate, size in zip(per_sample, sizes, strict=True):
        for slower, smaller in zip(per_sample, sizes, strict=True):
            # Sizes that stay may be the equal ones, the odd sample with the lowest index.
            assert smaller <= size + 1 or slower <= rate


def test_a_worker_without_an_estimate_keeps_its_last():
    # One that resumed from another worker's checkpoint begins to measure anew; the sizes must not fall back to equal.
    policy = Predicted().policy(4)
    assert decided(policy, 64, [4000, 4000, 2000, 1000]) == [8, 8, 16, 32]
    speeds = [4000, 4000, 2000, 1000]
    assert decided(policy, 64, [4000, 0, 2000, 0], measured=speeds) == [8, 8, 16, 32]
    speeds = [4000, 4000, 2000, 2000]
    for _ in range(3):
        sizes = decided(policy, 64, [4000, 0, 2000, 2000], measured=speeds)
    assert sizes == decided(Predicted().policy(4), 64, speeds)
