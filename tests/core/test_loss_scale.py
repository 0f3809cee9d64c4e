"""Means and sums are told apart by the gradients of unlike batches, and a mean is never taken for a sum."""

import numpy as np
import pytest

from evenstep.core.loss_scale import is_mean, is_mean_by_norms

SIZES = {"fixed": [12, 9, 3], "two": [18, 6], "nearly alike": [26, 22], "many": [40, 30, 20, 10, 8, 4, 2, 1]}


DRAWS = {
    "narrow": lambda generator, size: np.exp(generator.normal(0.0, 0.1, size)),
    "wide": lambda generator, size: np.exp(generator.normal(0.0, 1.5, size)),
    "outliers": lambda generator, size: np.where(generator.random(size) < 0.01, 100, 1) * generator.normal(size=size),
    "mostly zero": lambda generator, size: (generator.random(size) < 0.03) * generator.normal(size=size),
}


def levels_of(sizes, generator, *, mean, draw):
    """Mean log norms of the gradients at the outputs of samples."""
    levels = np.full(np.shape(sizes), np.nan)
    for place, size in np.ndenumerate(sizes):
        norms = np.abs(DRAWS[draw](generator, size))
        if norms.any():
            levels[place] = np.log(norms[norms > 0]).mean() - np.log(size) * mean
    return levels


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("name", SIZES)
def test_a_mean_is_not_taken_for_a_sum(name, draw):
    generator = np.random.default_rng(0)
    sizes = np.tile(SIZES[name], (20, 1))
    assert False not in [is_mean(sizes, levels_of(sizes, generator, mean=True, draw=draw)) for _ in range(200)]


def test_nor_is_one_whose_samples_are_sorted_by_their_errors():
    generator = np.random.default_rng(0)
    sizes = np.tile([12, 9, 3], (20, 1))
    norms = [np.split(np.sort(np.abs(generator.normal(size=24)))[::-1], [12, 21]) for _ in sizes]
    levels = np.array([[np.log(each).mean() - np.log(len(each)) for each in row] for row in norms])
    assert is_mean(sizes, levels) is None


@pytest.mark.parametrize("name", ["fixed", "two", "many"])
def test_a_sum_is_found(name):
    generator = np.random.default_rng(0)
    sizes = np.tile(SIZES[name], (20, 1))
    said = [is_mean(sizes, levels_of(sizes, generator, mean=False, draw="outliers")) for _ in range(50)]
    assert said.count(False) >= 40
    assert True not in said


def test_sizes_may_change_and_gradients_may_be_missing():
    generator = np.random.default_rng(0)
    sizes = np.array([[12, 9, 3], [3, 12, 9]] * 10)
    levels = levels_of(sizes, generator, mean=False, draw="narrow")
    levels[::3, 1] = np.nan
    assert is_mean(sizes, levels) is False
    assert is_mean(sizes, np.full(sizes.shape, np.nan)) is None
    assert is_mean(np.full((20, 3), 8), levels) is None


@pytest.mark.parametrize("name", ["fixed", "two", "many"])
@pytest.mark.parametrize("noise", [0.1, 1.0, 10.0])
def test_the_norms_of_whole_gradients_tell_them_apart_whether_noise_prevails_or_not(name, noise):
    generator = np.random.default_rng(0)
    sizes, said = np.tile(SIZES[name], (20, 1)), {True: [], False: []}
    for mean, found in said.items():
        for _ in range(20):
            # Of 50 parameters, of which one alone is to move.
            summed = sizes[..., np.newaxis] * np.eye(50)[0] + generator.normal(
                0.0, noise * np.sqrt(sizes / 50)[..., np.newaxis], (*sizes.shape, 50)
            )
            norms = np.linalg.norm(summed, axis=2)
            found.append(is_mean_by_norms(sizes, norms / sizes if mean else norms))
    assert False not in said[True]
    assert True not in said[False]
    assert said[False].count(False) >= 18
