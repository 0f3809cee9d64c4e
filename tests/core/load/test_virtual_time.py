"""What the predicted policy makes of whole runs, in virtual time."""

import numpy as np
import pytest

from evenstep.cluster.slowness import PointCurve
from evenstep.core.load import Equal, Predicted

SLOW = np.array([4.0, 4.0, 2.0, 1.0]) * 1e-3
BEST = np.array([32, 32, 64, 128])


def moves(sizes):
    return int((np.diff(sizes, axis=0) != 0).any(axis=1).sum())


def close(sizes, best):
    return bool((np.abs(sizes - best) <= np.maximum(0.05 * np.asarray(best), 1.0)).all())


def test_speeds_without_noise_are_met_exactly_at_the_first_plan(run):
    sizes, _ = run(4, 256, 60, lambda worker, iteration, size: SLOW[worker] * size)
    assert moves(sizes) == 1
    assert sizes[4].tolist() == BEST.tolist()
    assert (sizes[:4] == 64).all()


def test_speeds_with_little_noise_are_met_at_the_first_plan_and_kept(run, noise):
    for seed in range(5):
        factors = noise(0.005, seed, (200, 4))
        sizes, _ = run(4, 256, 200, lambda worker, k, size, f=factors: SLOW[worker] * size * f[k, worker])
        assert np.abs(sizes[4:] - BEST).max() <= 1
        assert moves(sizes) <= 2


@pytest.mark.parametrize(("workers", "level", "seeds"), [(4, 0.1, 3), (4, 0.3, 3), (16, 0.1, 2), (16, 0.3, 2)])
def test_jitter_on_equal_workers_costs_no_more_than_one_per_cent(run, noise, workers, level, seeds):
    for seed in range(seeds):
        factors = noise(level, seed, (500, workers))
        _, times = run(workers, 64 * workers, 500, lambda worker, k, size, f=factors: 1e-3 * size * f[k, worker])
        equal = 64e-3 * factors.max(axis=1).mean()
        assert times.max(axis=1).mean() <= 1.01 * equal


@pytest.mark.parametrize("level", [0.0, 0.005, 0.01])
@pytest.mark.parametrize("share", [1.0, 0.5, 0.2])
def test_a_change_of_speed_is_followed_within_three_iterations(run, noise, level, share):
    """`share` of the iteration in which the speed changes runs at the new speed."""
    begin, end = 30, 60

    for seed in range(3):
        factors = noise(level, seed, (90, 4))

        def seconds(worker, k, size, f=factors):
            slowdown = 1.0
            if worker == 1 and begin <= k <= end:
                slowdown = {begin: 1.0 + 2.0 * share, end: 3.0 - 2.0 * share}.get(k, 3.0)
            return 1e-3 * size * slowdown * f[k, worker]

        sizes, _ = run(4, 256, 90, seconds)
        assert close(sizes[begin], [64] * 4)
        assert close(sizes[begin + 3], [76.8, 25.6, 76.8, 76.8])
        assert close(sizes[end], [76.8, 25.6, 76.8, 76.8])
        assert close(sizes[end + 3], [64] * 4)


def test_a_single_odd_iteration_moves_nothing(run, noise):
    factors = noise(0.02, 0, (80, 4))
    factors[40, 2] *= 10.0
    sizes, _ = run(4, 256, 80, lambda worker, k, size: SLOW[worker] * size * factors[k, worker])
    assert (sizes[38:60] == sizes[38]).all()


@pytest.mark.parametrize("level", [0.0, 0.01])
def test_four_measured_devices_are_balanced_within_twenty_iterations(run, noise, level):
    devices = [PointCurve.measured(name) for name in ("gtx1070-a", "gtx1070-b", "tesla-m40", "gtx750")]
    table = np.array([[device.seconds(size) for size in range(513)] for device in devices])
    # No sizes can do better: the least time within which the largest sizes of all sum to the batch.
    best = next(t for t in np.unique(table) if sum(np.flatnonzero(row <= t).max(initial=0) for row in table) >= 512)
    for seed in range(3 if level else 1):
        factors = noise(level, seed, (100, 4))
        sizes, _ = run(4, 512, 100, lambda worker, k, size, f=factors: table[worker, size] * f[k, worker])
        makespan = table[np.arange(4), sizes].max(axis=1)
        assert makespan[0] > 4.0 * best
        assert (makespan[20:] <= 1.05 * best).all()


def test_episodes_are_followed(run, noise):
    generator = np.random.default_rng(3)
    slowdown = np.ones((400, 4))
    for worker in range(4):
        for begin in range(20 + 37 * worker, 400, 150):
            slowdown[begin : begin + int(generator.integers(30, 60)), worker] = generator.choice([1.5, 2.0, 3.0])
    factors = noise(0.02, 1, (400, 4))

    def seconds(worker, k, size):
        return 1e-3 * (size + 16) * slowdown[k, worker] * factors[k, worker]

    _, times = run(4, 256, 400, seconds)
    _, equal = run(4, 256, 400, seconds, load=Equal())
    ideal = (1e-3 * (256 + 4 * 16) / (1.0 / slowdown).sum(axis=1)).mean()
    assert times.max(axis=1).mean() <= 1.15 * ideal
    assert times.max(axis=1).mean() <= 0.75 * equal.max(axis=1).mean()


def test_a_slow_drift_is_followed(run, noise):
    slowdown = 1.0 + np.clip((np.arange(200) - 40) / 30.0, 0.0, 2.0)
    factors = noise(0.01, 1, (200, 4))

    def seconds(worker, k, size):
        return 1e-3 * (size + 16) * (slowdown[k] if worker == 1 else 1.0) * factors[k, worker]

    _, times = run(4, 256, 200, seconds)
    ideal = 1e-3 * (256 + 4 * 16) / (3.0 + 1.0 / slowdown)
    assert (times.max(axis=1) / ideal)[20:].mean() <= 1.06


@pytest.mark.parametrize("predictor", ["last", "ema", "change"])
@pytest.mark.parametrize("times", ["proportional", "affine"])
def test_every_predictor_balances(run, noise, predictor, times):
    factors = noise(0.01, 1, (80, 4))
    load = Predicted(predictor=predictor, times=times)
    sizes, _ = run(4, 256, 80, lambda worker, k, size: SLOW[worker] * (size + 10) * factors[k, worker], load=load)
    makespan = (SLOW * (sizes + 10)).max(axis=1)
    assert (makespan[20:] <= 1.06 * (256 + 40) / (1.0 / SLOW).sum()).all()


def test_the_same_observations_lead_to_the_same_decisions(run, noise):
    def sizes(seed):
        factors = noise(0.1, seed, (60, 4))
        return run(4, 256, 60, lambda worker, k, size: SLOW[worker] * size * factors[k, worker])[0]

    assert (sizes(1) == sizes(1)).all()
    assert (sizes(1) != sizes(2)).any()
