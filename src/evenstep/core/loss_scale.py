"""Whether a loss is a mean over each worker's own batch: how its gradient at the outputs falls with the batch size."""

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from evenstep.core.values import IntArray

_SURE: Final = 3.0
"""Standard errors."""


def is_mean(sizes: IntArray, squares: npt.NDArray[np.float64]) -> bool | None:
    """Whether gradients fall as those of a mean over the batch, or as those of a sum over it; None if it is not sure.

    A mean over b samples has the gradient h / b at a sample's output. So b times the squared norm is the mean of h
    squared, whatever b is; of a sum that is divided by a constant, it grows as b squared. Large and small batches of
    the same iterations are compared. The standard error is that of the jackknife over iterations.

    Args:
        sizes: int64 of shape [iterations, workers].
        squares: The squared norms of the gradients, float64 of shape [iterations, workers]; NaN where there is none.

    >>> sizes = np.tile([12, 9, 3], (20, 1))
    >>> noise = np.random.default_rng(0).uniform(0.5, 2.0, sizes.shape)
    >>> is_mean(sizes, noise / sizes), is_mean(sizes, noise * sizes)
    (True, False)
    """
    known = np.isfinite(squares)
    large = sizes * known.sum(1, keepdims=True) > np.where(known, sizes, 0).sum(1, keepdims=True)
    of_large, of_small = (np.where(known & each, squares * sizes, 0.0).sum(1) for each in (large, ~large))
    both = (of_large > 0) & (of_small > 0)
    if both.sum() < 2:
        return None
    # Per batch, and sums over the iterations without one of them.
    parts = []
    for each, total in ((large, of_large), (~large, of_small)):
        count = (known & each)[both].sum(1)
        parts += [total[both] / count, np.where(known & each, sizes, 0)[both].sum(1) / count]
    gradient, size, small_gradient, small_size = (each.sum() - each for each in parts)
    exponents = np.log(gradient / small_gradient) / np.log(size / small_size)
    exponent, count = float(exponents.mean()), len(exponents)
    error = math.sqrt((count - 1) * float(exponents.var()))
    return None if abs(exponent - 1.0) < _SURE * error else exponent < 1.0
