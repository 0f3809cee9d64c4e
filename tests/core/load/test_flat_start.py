"""The flat start of a device that is not full: when it is learned, when it is not, and what it is good for."""

import json
import math
from itertools import pairwise

import numpy as np
import pytest

from evenstep.cluster.slowness import MEASURED_CURVES, AffineCurve, PointCurve
from evenstep.core.load import Predicted, shape
from evenstep.core.load.shape import Shape
from evenstep.core.values import Sample

FIXED, RATE, FLAT = 10.0, 0.002, 60


def curve(samples):
    return RATE * (FIXED + max(samples, FLAT))


def estimator():
    return Predicted(warmup=0).estimator()


def fed(estimator, *stretches):
    """Feed stretches (samples, seconds, iterations)."""
    for samples, seconds, iterations in stretches:
        for _ in range(iterations):
            estimator.observe(samples, seconds)
    return estimator


def at(samples, iterations=4, slowdown=1.0):
    return samples, slowdown * curve(samples), iterations


def predicted(estimator, samples):
    estimate = estimator.estimate()
    return (estimate.fixed_nanoseconds + max(samples, estimate.flat_size) * estimate.nanoseconds_per_sample) * 1e-9


def flat_sizes(sizes, times):
    """The flat starts that an estimator learns from one worker's iterations, after each of them."""
    learner = estimator()
    found = []
    for samples, seconds in zip(sizes, times, strict=True):
        learner.observe(int(samples), float(seconds))
        found.append(learner.estimate().flat_size)
    return np.array(found)


def test_two_sizes_that_take_equally_long_are_a_flat_start():
    learner = fed(estimator(), at(50, 12), at(25))
    assert learner.estimate().flat_size == 50
    assert [predicted(learner, samples) for samples in (1, 25, 50)] == pytest.approx([curve(1)] * 3)


def test_beyond_it_time_is_taken_to_grow_in_proportion_until_larger_sizes_tell():
    learner = fed(estimator(), at(50, 12), at(25))
    assert predicted(learner, 100) == pytest.approx(2.0 * curve(50))
    fed(learner, at(100))
    assert learner.estimate().flat_size == 50
    assert predicted(learner, 100) == pytest.approx(curve(100), rel=0.01)
    assert predicted(learner, 90) == pytest.approx(curve(90), rel=0.05)
    assert predicted(learner, 25) == pytest.approx(curve(25), rel=0.01)


def test_a_larger_size_that_takes_as_long_extends_it():
    learner = fed(estimator(), at(30, 12), at(10), at(58))
    assert learner.estimate().flat_size == 58


def test_a_flat_start_is_found_in_noise(noise):
    for seed in range(10):
        sizes = [50] * 20 + [20] * 6
        times = [curve(x) * f for x, f in zip(sizes, noise(0.03, seed, [26]), strict=True)]
        assert flat_sizes(sizes, times)[-1] == 50


def test_a_slowdown_keeps_it():
    learner = fed(estimator(), at(50, 12), at(25), at(25, slowdown=3.0))
    assert learner.estimate().flat_size == 50
    assert predicted(learner, 40) == pytest.approx(3.0 * curve(40), rel=0.01)


def test_it_is_forgotten_where_smaller_sizes_take_less_time():
    learner = fed(estimator(), (50, 0.1, 12), (25, 0.1, 4))
    assert learner.estimate().flat_size == 50
    assert fed(learner, (10, 0.05, 4)).estimate().flat_size == 0


def test_a_change_of_speed_in_the_same_iteration_misleads_it_until_the_next_change_of_size():
    learner = fed(estimator(), (50, 0.1, 12), (25, 0.1, 4))
    fed(learner, (40, 0.16, 4))
    assert learner.estimate().flat_size == 0
    assert predicted(learner, 20) == pytest.approx(0.08, rel=0.01)


@pytest.mark.parametrize("sizes", [(64, 52), (48, 40, 35)])
def test_small_changes_of_size_do_not_tell_a_flat_start_from_a_drift(sizes):
    assert fed(estimator(), *[(samples, 0.1, 12) for samples in sizes]).estimate().flat_size == 0


@pytest.mark.parametrize("name", MEASURED_CURVES)
@pytest.mark.parametrize("ratio", [1.5, 1.75, 2.0, 3.0])
def test_the_steps_of_measured_curves_are_no_flat_start(name, ratio):
    device = PointCurve.measured(name)
    for small in range(16, 64):
        sizes = small, round(ratio * small)
        for pair in (sizes, sizes[::-1]):
            learner = fed(estimator(), *[(samples, device.seconds(samples), 8) for samples in pair])
            assert learner.estimate().flat_size == 0, pair


@pytest.mark.parametrize("level", [0.01, 0.1, 0.3])
@pytest.mark.parametrize("fixed", [0.0, 16.0])
def test_neither_jitter_nor_episodes_make_one(run, noise, level, fixed):
    for seed in range(3):
        generator = np.random.default_rng(seed)
        slowdown = np.ones((300, 4))
        for worker in range(4):
            for begin in range(20 + 37 * worker, 300, 90):
                slowdown[begin : begin + int(generator.integers(20, 50)), worker] = generator.choice([1.5, 2.0, 3.0])
        factors = slowdown * noise(level, seed, (300, 4))
        sizes, times = run(4, 256, 300, lambda worker, k, size, f=factors: 1e-3 * (size + fixed) * f[k, worker])
        for worker in range(4):
            assert not flat_sizes(sizes[:, worker], times[:, worker]).any()


def test_a_drift_makes_none(run, noise):
    slowdown = 1.0 + np.clip((np.arange(200) - 40) / 30.0, 0.0, 2.0)
    factors = noise(0.01, 1, (200, 4))

    def seconds(worker, k, size):
        return 1e-3 * (size + 16) * (slowdown[k] if worker == 1 else 1.0) * factors[k, worker]

    sizes, times = run(4, 256, 200, seconds)
    assert not flat_sizes(sizes[:, 1], times[:, 1]).any()


def optimum(table, batch):
    """The least time within which the workers' largest sizes sum to the batch, none of them without a sample."""
    candidates = np.unique(table[:, 1:])
    return next(
        t
        for t in candidates[candidates >= table[:, 1].max()]
        if sum(np.flatnonzero(row <= t).max() for row in table) >= batch
    )


DEVICES = {
    "full near a share": [(6.5, 58, 2.3), (14, 45, 1.6), (9.3, 38, 1.4), (10.6, 0, 3.1)],
    "full at half a share": [(0, 32, 2.0), (8, 32, 2.5), (8, 0, 1.0), (4, 0, 1.2)],
    "full at an eighth of a share": [(16, 8, 2.0), (4, 8, 3.0), (0, 0, 1.0), (4, 8, 1.2)],
    "flat beyond an equal share": [(6, 90, 1.2), (2, 0, 2.0), (10, 110, 1.1), (4, 0, 1.8)],
}


@pytest.mark.parametrize("level", [0.0, 0.01])
@pytest.mark.parametrize("name", DEVICES)
def test_devices_with_a_flat_start_are_balanced_before_in_and_after_episodes(run, noise, name, level):
    """A worker that was the slowest for a while gives its samples away, and has to get them back afterwards."""
    devices = [
        AffineCurve(fixed_seconds=1e-3 * fixed * rate, seconds_per_sample=1e-3 * rate, flat_size=flat)
        for fixed, flat, rate in DEVICES[name]
    ]
    table = np.array([[device.seconds(size) for size in range(257)] for device in devices])
    ends = [60, 120, 180, 240, 300]
    slowdown = np.ones((300, 4))
    slowdown[60:120, 0], slowdown[180:240, 1] = 3.0, 2.0
    factors = slowdown * noise(level, 0, (300, 4))
    sizes, _ = run(4, 256, 300, lambda worker, k, size: table[worker, size] * factors[k, worker])
    makespan = (table[np.arange(4), sizes] * slowdown).max(axis=1)
    for begin, end in pairwise([0, *ends]):
        best = optimum(table * slowdown[begin][:, None], 256)
        assert makespan[end - 10 : end].max() <= 1.02 * best, (begin, end)


def test_a_checkpoint_with_a_flat_start_goes_on_bit_for_bit():
    stretches = [at(50, 12), at(25), at(100), at(40), at(40, slowdown=2.0), (10, 0.01, 4)]
    for cut in range(len(stretches)):
        one, other = fed(estimator(), *stretches[:cut]), estimator()
        other.load_state_dict(json.loads(json.dumps(one.state_dict(), allow_nan=False)))
        fed(one, *stretches[cut:])
        fed(other, *stretches[cut:])
        assert one.state_dict() == other.state_dict()


@pytest.mark.parametrize("noise", [0.002, 0.03, 0.1, 0.3])
@pytest.mark.parametrize("flat", [0.0, 24.0])
def test_what_is_not_looked_at_would_have_told_nothing(noise, flat, monkeypatch):
    """The shape skips a fit that its range of sizes rules out: the same shapes as with every fit made."""
    random = np.random.default_rng(7)
    sizes = np.repeat(random.choice([16, 17, 20, 21, 24, 40], 60), random.integers(1, 20, 60)).tolist()
    times = [0.004 * (5 + max(size, flat)) * math.exp(noise * random.standard_normal()) for size in sizes]

    def shapes():
        one, seen = Shape(), []
        for size, seconds in zip(sizes, times, strict=True):
            sample = Sample(size, seconds)
            one.observe(sample, one.effective(sample))
            seen.append((one.fixed_samples, one.flat_samples, len(one.window)))
        return seen

    quick = shapes()
    monkeypatch.setattr(Shape, "_tells", lambda self, newest: True)
    monkeypatch.setattr(shape, "_too_similar", lambda least, most, *_: most < 1.02 * least)
    assert quick == shapes()
    assert len(set(quick)) > 1
