"""That sizes settle and stay, in virtual time: noise in bursts, a disturbance that ends, times without a slope."""

import numpy as np
import pytest

ITERATIONS = 200


def bursts(seed, workers, level):
    """Noise, and now and then up to four iterations in which one worker is slower, by up to 25 %."""
    generator = np.random.default_rng(seed)
    factors = np.exp(generator.normal(0.0, level, (ITERATIONS, workers)))
    for worker in range(workers):
        for begin in np.flatnonzero(generator.random(ITERATIONS) < 0.02):
            factors[begin : begin + int(generator.integers(1, 5)), worker] *= generator.uniform(1.1, 1.25)
    return factors


def changes(sizes):
    return int((np.diff(sizes, axis=0) != 0).any(axis=1).sum())


@pytest.mark.parametrize("workers", [2, 4])
def test_bursts_leave_equal_workers_equal(run, workers):
    for seed in range(5):
        factors = bursts(seed, workers, 0.08)
        sizes, _ = run(workers, 32 * workers, ITERATIONS, lambda i, k, size, f=factors: 1e-3 * (16 + size) * f[k, i])
        assert changes(sizes) == 0


@pytest.mark.parametrize("fixed", [0, 32])
@pytest.mark.parametrize("level", [0.05, 0.15])
def test_equal_sizes_return_soon_after_a_disturbance(run, noise, level, fixed):
    for seed in range(4):
        factors = noise(level, seed, (ITERATIONS, 2))
        factors[60:120, 1] *= 3.0
        sizes, _ = run(2, 64, ITERATIONS, lambda i, k, size, f=factors: 1e-3 * (fixed + size) * f[k, i])
        assert sizes[110, 1] < 20
        assert np.abs(sizes[140:] - 32).max() <= 1


def test_a_worker_that_cannot_keep_up_does_not_drive_the_others_apart(run, noise):
    # The time of a tiny model hardly depends on the size: worker 3 is the last with its smallest batch too.
    for seed in range(5):
        factors = noise(0.1, seed, (ITERATIONS, 4))
        factors[:, 3] *= 4.0
        sizes, _ = run(4, 128, ITERATIONS, lambda i, k, size, f=factors: 1e-5 * (200 + size) * f[k, i])
        assert np.ptp(sizes[100:, :3], axis=1).max() <= 2


def test_a_large_change_is_followed_in_noise(run, noise):
    for seed in range(6):
        factors = noise(0.1, seed, (ITERATIONS, 4))
        factors[60:, 3] *= 3.0
        sizes, _ = run(4, 128, ITERATIONS, lambda i, k, size, f=factors: 1e-3 * size * f[k, i])
        assert (sizes[:60] == 32).all()
        assert sizes[63, 3] <= 18


@pytest.mark.parametrize("fixed", [0, 100])
def test_bursts_of_short_iterations_leave_equal_workers_equal(run, fixed):
    """Iterations of about 3 ms, in some bursts, which last for 15 ms on average, of twice as much."""
    for seed in range(5):
        generator = np.random.default_rng(seed)
        slow = np.cumsum(generator.random((600, 2)) < 0.2, axis=0) % 2
        factors = np.exp(generator.normal(0.0, 0.1, (600, 2))) * (1 + slow)
        sizes, _ = run(2, 64, 600, lambda i, k, size, f=factors, c=fixed: 3e-3 * (c + size) / (c + 32) * f[k, i])
        assert changes(sizes) == 0


def test_where_all_sizes_take_equally_long_sizes_stay(run, noise):
    for seed in range(5):
        factors = noise(0.4, seed, (600, 2))
        sizes, _ = run(2, 16, 600, lambda i, k, size, f=factors: 1e-3 * f[k, i])
        assert changes(sizes) == 0


def test_short_iterations_of_unequal_workers_are_balanced_all_the_same(run, noise):
    for seed in range(5):
        factors = noise(0.2, seed, (300, 2))
        factors[:, 1] *= 3.0
        sizes, _ = run(2, 64, 300, lambda i, k, size, f=factors: 1e-4 * size * f[k, i])
        assert (np.abs(sizes[60:] - [48, 16]) <= 3).all()
