import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.core.load import PREDICTORS, Predicted
from evenstep.core.values import Estimate

FIXED, RATE = 20.0, 0.002


def seconds(samples, factor=1.0):
    return factor * RATE * (FIXED + samples)


def fed(estimator, observations):
    for samples, measured in observations:
        estimator.observe(samples, measured)
    return estimator


def affine():
    return Predicted(times="affine", warmup=0).estimator()


def fixed_samples(estimator):
    estimate = estimator.estimate()
    return estimate.fixed_nanoseconds / estimate.nanoseconds_per_sample


def predicted(estimator, samples):
    estimate = estimator.estimate()
    return (estimate.fixed_nanoseconds + samples * estimate.nanoseconds_per_sample) * 1e-9


def test_nothing_is_known_before_the_warm_up_is_over():
    estimator = fed(Predicted(warmup=2).estimator(), [(64, 9.0), (64, 3.0), (0, 1.0)])
    assert estimator.estimate() == Estimate()
    estimator.observe(64, 0.064)
    assert estimator.estimate().nanoseconds_per_sample == 1_000_000
    assert estimator.estimate().fixed_nanoseconds == 0


def test_in_proportion_no_fixed_part_is_ever_found():
    estimator = fed(
        Predicted(times="proportional", warmup=0).estimator(), [(x, seconds(x)) for x in (64, 32) for _ in range(10)]
    )
    assert estimator.estimate().fixed_nanoseconds == 0


@pytest.mark.parametrize("sizes", [(64, 32), (32, 128), (64, 48, 40), (100, 75)])
def test_a_fixed_part_is_found_from_two_sizes(sizes):
    estimator = fed(affine(), [(x, seconds(x)) for x in sizes for _ in range(12)])
    assert fixed_samples(estimator) == pytest.approx(FIXED, rel=0.05)
    assert predicted(estimator, 256) == pytest.approx(seconds(256), rel=0.02)


def test_a_fixed_part_is_found_in_noise(noise):
    found = []
    for seed in range(10):
        factors = noise(0.02, seed, [60])
        sizes = [128] * 4 + [40] * 6 + [32] * 50
        estimator = fed(affine(), [(x, seconds(x, f)) for x, f in zip(sizes, factors, strict=True)])
        found.append(fixed_samples(estimator))
    assert np.abs(np.array(found) - FIXED).max() < 5.0


def test_no_fixed_part_is_found_where_there_is_none(noise):
    for seed in range(10):
        sizes = [64] * 5 + [48] * 20 + [60] * 20
        times = [RATE * x * f for x, f in zip(sizes, noise(0.05, seed, [45]), strict=True)]
        assert fixed_samples(fed(affine(), zip(sizes, times, strict=True))) < 8.0


def test_no_fixed_part_is_looked_for_where_sizes_are_alike(noise):
    factors = noise(0.1, 0, [200])
    estimator = fed(affine(), [(64 + k % 2, seconds(64 + k % 2, f)) for k, f in enumerate(factors)])
    assert estimator.estimate().fixed_nanoseconds == 0


def test_a_slowdown_scales_the_speed_and_keeps_the_fixed_part():
    estimator = fed(affine(), [(x, seconds(x)) for x in (64, 32, 48) for _ in range(6)])
    before = fixed_samples(estimator)
    fed(estimator, [(48, seconds(48, 3.0))] * 2)
    assert fixed_samples(estimator) == pytest.approx(before, abs=0.01)
    assert predicted(estimator, 16) == pytest.approx(seconds(16, 3.0), rel=0.02)


def test_iterations_of_the_old_speed_do_not_pollute_the_fit():
    estimator = fed(affine(), [(x, seconds(x)) for x in (64, 32, 48) for _ in range(6)])
    fed(estimator, [(48, seconds(48, 2.0)), (48, seconds(48, 3.0))])
    for size in (24, 30, 26):
        fed(estimator, [(size, seconds(size, 3.0))] * 3)
        assert fixed_samples(estimator) == pytest.approx(FIXED, rel=0.1)


def test_a_single_outlier_changes_nothing_that_matters():
    estimator = fed(affine(), [(x, seconds(x)) for x in (64, 32) for _ in range(8)])
    before = estimator.estimate()
    estimator.observe(32, seconds(32, 10.0))
    after = estimator.estimate()
    assert after.nanoseconds_per_sample == before.nanoseconds_per_sample
    assert after.fixed_nanoseconds == before.fixed_nanoseconds


def test_the_fixed_part_stays_within_its_limits():
    flat = fed(affine(), [(x, 0.1) for x in (64, 16, 4) for _ in range(10)])
    assert 0 <= fixed_samples(flat) <= 10 * 64
    convex = fed(affine(), [(x, 0.001 * x**1.5) for x in (64, 16, 32) for _ in range(10)])
    assert fixed_samples(convex) < 1.0


@pytest.mark.parametrize("name", PREDICTORS)
@pytest.mark.parametrize("times", ["proportional", "affine"])
@given(st.lists(st.tuples(st.integers(0, 10**6), st.floats(0.0, 1e30)), max_size=40), st.integers(0, 40))
def test_a_checkpoint_goes_on_bit_for_bit(name, times, observations, at):
    one, other = (Predicted(predictor=name, times=times, warmup=1).estimator() for _ in range(2))
    fed(one, observations[:at])
    other.load_state_dict(json.loads(json.dumps(one.state_dict(), allow_nan=False)))
    fed(one, observations[at:])
    fed(other, observations[at:])
    assert one.estimate() == other.estimate()
    assert one.state_dict() == other.state_dict()


@pytest.mark.parametrize(("samples", "measured"), [(-1, 1.0), (1, -1.0), (1, float("nan")), (1, float("inf"))])
def test_impossible_measurements_are_refused(samples, measured):
    with pytest.raises(ValueError, match="finite"):
        affine().observe(samples, measured)
