"""The fixed part of an iteration, from made-up iterations whose fixed part is known."""

import numpy as np
import pytest

from evenstep.advice.fixed_part import fixed_shares
from evenstep.report.iterations import Iterations

COLUMNS = (
    "numbers", "began", "iteration_seconds", "input_seconds", "wait_seconds", "comm_seconds", "staleness", "behind",
    "lead", "cost", "padding",
)  # fmt: skip


def made(share, *, slow=1.0, size=16, others=8, noise=0.0, seed=0, fit=(np.nan, 0.0)):
    """Five iterations of equal sizes, then 40 of others; 0.1 s at equal sizes, of which `share` is fixed."""
    samples = np.array([size] * 5 + [others] * 40, dtype=float)
    seconds = slow * 0.1 * (share + (1 - share) * samples / size)
    seconds *= np.exp(noise * np.random.default_rng(seed).standard_normal(len(samples)))
    rest = {name: np.zeros(len(samples)) for name in COLUMNS}
    pace, fixed = (np.full(len(samples), value) for value in fit)
    basis = np.array([1.0] * 5 + [0.0] * 40)
    return Iterations(samples=samples, basis=basis, compute_seconds=seconds, pace=pace, fixed=fixed, **rest)


def test_workers_that_differ_keep_their_own_fixed_parts():
    workers = [made(share, others=others) for share, others in ((0.1, 8), (0.5, 20), (0.3, 6), (0.0, 30))]
    assert fixed_shares(workers, 16) == pytest.approx([0.1, 0.5, 0.3, 0.0], abs=1e-3)


def test_noise_of_one_worker_is_explained_by_the_others():
    errors, alone = [], []
    for seed in range(20):
        workers = [made(0.2, others=8, noise=0.1, seed=100 * seed + each) for each in range(8)]
        errors += [abs(share - 0.2) for share in fixed_shares(workers, 16)]
        alone += [abs(fixed_shares([worker], 16)[0] - 0.2) for worker in workers]
    assert np.mean(errors) < 0.6 * np.mean(alone)


def test_a_worker_whose_sizes_hardly_changed_has_what_the_others_show():
    workers = [made(0.3, others=8), made(0.3, others=17), made(0.3, others=24)]
    assert fixed_shares(workers, 16) == pytest.approx([0.3] * 3, abs=1e-3)


def test_without_other_sizes_the_fits_of_the_workers_count_and_nothing_is_made_up():
    equal = made(0.3, others=16)
    assert fixed_shares([equal, equal], 16) is None
    fitted = made(0.3, others=16, fit=(0.01, 0.04))
    assert fixed_shares([equal, fitted], 16) == pytest.approx([0.2, 0.2])


def test_an_impossible_fixed_part_is_cut():
    falling = made(1.2, others=8)  # Smaller batches take longer.
    assert fixed_shares([falling], 16) == [0.95]
