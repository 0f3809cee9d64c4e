"""Means and sums are told apart by the gradients of unlike batches, and a mean is never taken for a sum."""

import numpy as np
import pytest

from evenstep.core.loss_scale import is_mean

SIZES = {"fixed": [12, 9, 3], "two": [18, 6], "nearly alike": [26, 22], "many": [40, 30, 20, 10, 8, 4, 2, 1]}


def squares_of(sizes, generator, *, mean, spread):
    """Squared norms of the gradients at `sizes` outputs, whose own gradients are lognormal."""
    own = [[np.exp(generator.normal(0.0, spread, size)) ** 2 for size in row] for row in sizes]
    return np.array([[each.sum() / (len(each) ** 2 if mean else 1) for each in row] for row in own])


@pytest.mark.parametrize("spread", [0.1, 0.5, 1.0, 1.5])
@pytest.mark.parametrize("name", SIZES)
def test_a_mean_is_not_taken_for_a_sum(name, spread):
    generator = np.random.default_rng(0)
    sizes = np.tile(SIZES[name], (20, 1))
    assert False not in [is_mean(sizes, squares_of(sizes, generator, mean=True, spread=spread)) for _ in range(200)]


@pytest.mark.parametrize("name", ["fixed", "two", "many"])
def test_a_sum_is_found(name):
    generator = np.random.default_rng(0)
    sizes = np.tile(SIZES[name], (20, 1))
    said = [is_mean(sizes, squares_of(sizes, generator, mean=False, spread=0.5)) for _ in range(50)]
    assert said.count(False) >= 45
    assert True not in said


def test_sizes_may_change_and_gradients_may_be_missing():
    generator = np.random.default_rng(0)
    sizes = np.array([[12, 9, 3], [3, 12, 9]] * 10)
    squares = squares_of(sizes, generator, mean=False, spread=0.2)
    squares[::3, 1] = np.nan
    assert is_mean(sizes, squares) is False
    assert is_mean(sizes, np.full(sizes.shape, np.nan)) is None
    assert is_mean(np.full((20, 3), 8), squares) is None
