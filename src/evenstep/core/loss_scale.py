"""Whether a loss is a mean over each worker's own batch: how its gradient at the outputs falls with the batch size."""

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from evenstep.core.values import IntArray

_SURE: Final = 3.0
"""Standard errors."""
_SUM: Final = 0.25
"""How far from 0, that of a sum's gradient, an exponent may be; that of a mean is 1."""
_FEWEST: Final = 10
"""Iterations, for the error of fewer is not known."""


def is_mean(sizes: IntArray, levels: npt.NDArray[np.float64]) -> bool | None:
    """Whether gradients fall as those of a mean over the batch, or not at all, as those of a sum; None if unsure.

    A mean over b samples has the gradient h / b at a sample's output, a sum has h. So the logarithm of its norm,
    averaged over the samples of a batch, falls with log b by an exponent of 1 or of 0. Its expectation does not depend
    on b, and rare samples with large gradients weigh little. Batches of the same iterations are compared by least
    squares; the standard error is that of clusters, the iterations.

    Args:
        sizes: int64 of shape [iterations, workers].
        levels: The mean log norm of a sample's gradient, float64 of shape [iterations, workers]; NaN if unknown.

    >>> sizes = np.tile([12, 9, 3], (20, 1))
    >>> noise = np.random.default_rng(0).normal(0.0, 0.5, sizes.shape)
    >>> is_mean(sizes, noise - np.log(sizes)), is_mean(sizes, noise)
    (True, False)
    """
    known = np.isfinite(levels)
    logs, fall = (_centred(each, known) for each in (np.log(sizes), -levels))
    spread = float((logs**2).sum())
    if (logs**2).any(1).sum() < _FEWEST:
        return None
    exponent = float((logs * fall).sum()) / spread
    error = _SURE * math.sqrt(((logs * (fall - exponent * logs)).sum(1) ** 2).sum()) / spread
    if exponent - error > 0.5:
        return True
    return False if exponent + error < 0.5 and abs(exponent) < _SUM else None


def _centred(values: npt.NDArray[np.float64], known: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    """Less the mean of the iteration's known values; 0 where a value is unknown."""
    counts = np.maximum(known.sum(1, keepdims=True), 1)
    return np.where(known, values - np.where(known, values, 0.0).sum(1, keepdims=True) / counts, 0.0)
