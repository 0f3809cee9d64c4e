"""What the experts make of whole runs, in virtual time: the time that they take, not whether sizes stand still."""

import numpy as np
import pytest

from evenstep.cluster.slowness import PointCurve
from evenstep.core.load import PREDICTORS, Equal, Experts, LoadOf
from evenstep.core.load.time_models import TimeModelsPolicy

SLOW = np.array([4.0, 4.0, 2.0, 1.0]) * 1e-3
BEST = np.array([32, 32, 64, 128])


def moves(sizes):
    return int((np.diff(sizes, axis=0) != 0).any(axis=1).sum())


def taken(times):
    return times.max(axis=1).sum()


def test_speeds_without_noise_are_met_at_the_first_plan_and_kept(run):
    sizes, _ = run(4, 256, 60, lambda worker, k, size: SLOW[worker] * size)
    assert (sizes[:2] == 64).all()
    assert (np.abs(sizes[2:] - BEST) <= 1).all()
    assert (sizes[10:] == BEST).all()


@pytest.mark.parametrize("level", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("workers", [2, 4, 16])
def test_white_noise_on_equal_workers_costs_next_to_nothing(run, noise, workers, level):
    ratios = []
    for seed in range(5):
        factors = noise(level, seed, (300, workers))
        _, times = run(workers, 64 * workers, 300, lambda worker, k, size, f=factors: 1e-3 * size * f[k, worker])
        ratios.append(taken(times) / (64e-3 * factors.max(axis=1)).sum())
    assert np.mean(ratios) <= 1.006


@pytest.mark.parametrize("milliseconds", [3, 10, 50, 300])
@pytest.mark.parametrize("level", [0.02, 0.1])
def test_a_step_is_followed_within_three_iterations_however_short_they_are(run, noise, milliseconds, level):
    there, back = [], []
    for seed in range(5):
        factors = noise(level, seed, (140, 4))
        factors[60:120, 3] *= 4.0
        rate = milliseconds * 1e-3 / 64
        sizes, _ = run(4, 256, 140, lambda worker, k, size, f=factors, r=rate: r * size * f[k, worker])
        # What is had of the possible gain.
        there.append((64 * 4 - (sizes[63] * [1, 1, 1, 4]).max()) / (64 * 4 - 256 / 3.25))
        back.append((256 / 3.25 - sizes[130].max()) / (256 / 3.25 - 64))
    assert np.median(there) >= 2 / 3
    assert np.median(back) >= 1 / 2


@pytest.mark.parametrize("share", [1.0, 0.5, 0.2])
def test_a_change_within_an_iteration_is_followed(run, noise, share):
    """`share` of the iteration in which the speed changes runs at the new speed."""
    for seed in range(3):
        factors = noise(0.01, seed, (90, 4))
        factors[30, 1] *= 1.0 + 2.0 * share
        factors[31:60, 1] *= 3.0
        sizes, _ = run(4, 256, 90, lambda worker, k, size, f=factors: 1e-3 * size * f[k, worker])
        assert sizes[33, 1] <= 38
        assert sizes[63, 1] >= 50


def test_a_single_odd_iteration_is_soon_forgotten(run, noise):
    factors = noise(0.02, 0, (80, 4))
    factors[40, 2] *= 10.0
    _, times = run(4, 256, 80, lambda worker, k, size: SLOW[worker] * size * factors[k, worker])
    assert taken(times[42:60]) <= 1.1 * taken(times[20:38])


@pytest.mark.parametrize("load", [Experts(), LoadOf(make=TimeModelsPolicy)], ids=["experts", "solver"])
@pytest.mark.parametrize("level", [0.0, 0.01])
def test_four_measured_devices_are_balanced_within_seven_iterations(run, noise, level, load):
    devices = [PointCurve.measured(name) for name in ("gtx1070-a", "gtx1070-b", "tesla-m40", "gtx750")]
    table = np.array([[device.seconds(size) for size in range(513)] for device in devices])
    # No sizes can do better: the least time within which the largest sizes of all sum to the batch.
    best = next(t for t in np.unique(table) if sum(np.flatnonzero(row <= t).max(initial=0) for row in table) >= 512)
    for seed in range(3 if level else 1):
        factors = noise(level, seed, (100, 4))
        sizes, _ = run(4, 512, 100, lambda worker, k, size, f=factors: table[worker, size] * f[k, worker], load=load)
        makespan = table[np.arange(4), sizes].max(axis=1)
        assert makespan[0] > 4.0 * best
        assert (makespan[7:] <= 1.08 * best).all()
        assert makespan[7:].mean() <= 1.05 * best


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
    ideal = (1e-3 * (256 + 4 * 16) / (1.0 / slowdown).sum(axis=1)).sum()
    assert taken(times) <= 1.1 * ideal
    assert taken(times) <= 0.75 * taken(equal)


def test_a_slow_drift_is_followed(run, noise):
    slowdown = 1.0 + np.clip((np.arange(200) - 40) / 30.0, 0.0, 2.0)
    factors = noise(0.01, 1, (200, 4))

    def seconds(worker, k, size):
        return 1e-3 * (size + 16) * (slowdown[k] if worker == 1 else 1.0) * factors[k, worker]

    _, times = run(4, 256, 200, seconds)
    ideal = 1e-3 * (256 + 4 * 16) / (3.0 + 1.0 / slowdown)
    assert (times.max(axis=1) / ideal)[20:].mean() <= 1.05


@pytest.mark.parametrize("predictor", PREDICTORS)
@pytest.mark.parametrize("fixed", [0, 10])
def test_every_predictor_balances(run, noise, predictor, fixed):
    factors = noise(0.01, 1, (80, 4))
    load = Experts(predictor=predictor)
    sizes, _ = run(4, 256, 80, lambda worker, k, size: SLOW[worker] * (size + fixed) * factors[k, worker], load=load)
    makespan = (SLOW * (sizes + fixed)).max(axis=1)
    assert (makespan[20:] <= 1.06 * (256 + 4 * fixed) / (1.0 / SLOW).sum()).all()


def test_the_mean_of_the_experts_is_about_as_good_as_the_best_of_them_in_each_kind_of_run(run, noise):
    generator = np.random.default_rng(0)
    kinds = {
        "steady": np.tile([1.0, 1.0, 2.0, 4.0], (300, 1)) * noise(0.15, 1, (300, 4)),
        "comes and goes": np.repeat(generator.choice([1.0, 2.5], (30, 4)), 10, axis=0) * noise(0.03, 2, (300, 4)),
    }
    for kind, factors in kinds.items():
        spent = {
            name: taken(
                run(4, 256, 300, lambda i, k, x, f=factors: 1e-3 * x * f[k, i], load=Experts(predictor=name))[1]
            )
            for name in ("experts", "ema", "last")
        }
        assert spent["experts"] <= 1.02 * min(spent.values()), (kind, spent)
        assert spent["experts"] <= 0.98 * max(spent.values()), (kind, spent)


def test_the_same_observations_lead_to_the_same_decisions(run, noise):
    def sizes(seed):
        factors = noise(0.1, seed, (60, 4))
        return run(4, 256, 60, lambda worker, k, size: SLOW[worker] * size * factors[k, worker])[0]

    assert (sizes(1) == sizes(1)).all()
    assert (sizes(1) != sizes(2)).any()
