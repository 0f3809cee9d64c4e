"""Tells by how gradients fall with the batch size whether a loss is a mean over each worker's own batch."""

import math
from typing import Final

import numpy as np

from evenstep.core.values import BoolArray, FloatArray, IntArray

_SURE: Final = 3.0
"""A decision needs a distance of this many standard errors."""
_SUM: Final = 0.25
"""How far an exponent may be from 0, the exponent of a sum's gradient; a mean's is 1."""
_FEWEST: Final = 10
"""The fewest iterations for a decision: with fewer, the error is not known."""
_STEEP: Final = 0.25
"""The least mean log ratio of the halves of a batch that tells of an order; a smaller one moves no exponent far."""
_ALIKE: Final = 1.05
"""The ratio of two workers' divisors that is no reason to refuse a loss: it is that of counts that vary little."""


def is_divided_alike(ratios: FloatArray) -> bool:
    """True if what a mean is divided by is, on each worker, in proportion to what it should be, or is not known.

    Args:
        ratios: What it should be over what it is, float64 of shape [iterations, workers]; not above 0 if unknown.

    >>> is_divided_alike(np.tile([1.0, 1.02], (20, 1))), is_divided_alike(np.tile([1.0, 1.2], (20, 1)))
    (True, False)
    """
    known = ratios[(np.isfinite(ratios) & (ratios > 0)).all(1)]
    return len(known) < _FEWEST or float(np.median(known.max(1) / known.min(1))) < _ALIKE


def is_mean_by_norms(sizes: IntArray, norms: FloatArray) -> bool | None:
    """Like `is_mean`, from the norms of the parameters' whole gradients (0 if unknown), for outputs without rows.

    The norm of a mean over b samples falls by an exponent of 0, or of 1/2 where noise prevails. After subtracting log b
    that is 1 to 3/2, where a sum has 0 to 1/2.
    """
    return is_mean(sizes, np.log(np.where(norms > 0, norms, np.nan)) - np.log(sizes), of_sum=0.5)


def is_mean(sizes: IntArray, levels: FloatArray, *, of_sum: float = 0.0) -> bool | None:
    """True if gradients fall like a mean's over the batch, False if they do not fall, like a sum's; None if unsure.

    At a sample's output, a mean over b samples has the gradient h / b, a sum has h. So the logarithm of its norm,
    averaged over the samples of a batch, falls with log b by an exponent of 1 or of 0. Its expectation does not depend
    on b, and rare samples with large gradients weigh little. Batches of the same iterations are compared by least
    squares; the standard error is clustered by iteration.

    Args:
        sizes: int64 of shape [iterations, workers].
        levels: The mean log norm of a sample's gradient, float64 of shape [iterations, workers]; NaN if unknown.
        of_sum: The largest exponent of a sum.

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
    middle = (1.0 + of_sum) / 2
    if exponent - error > middle:
        return True
    return False if exponent + error < middle and -_SUM < exponent < of_sum + _SUM else None


def is_in_order(trends: FloatArray) -> bool:
    """True if gradients depend on a sample's place in its batch, as in data that are sorted.

    Small and large batches are of other places of a slice then, and their gradients differ for that reason.

    Args:
        trends: The mean log norm of the gradients of a batch's first half of samples less that of its second half,
            float64 of shape [iterations, workers]; NaN if unknown.

    >>> noise = np.random.default_rng(0).normal(0.0, 0.5, (20, 3))
    >>> is_in_order(noise), is_in_order(noise + 0.8)
    (False, True)
    """
    known = np.isfinite(trends)
    if known.any(1).sum() < _FEWEST:
        return False
    mean = float(trends[known].mean())
    error = math.sqrt((np.where(known, trends - mean, 0.0).sum(1) ** 2).sum()) / known.sum()
    return bool(abs(mean) > max(_STEEP, _SURE * error))


def _centred(values: FloatArray, known: BoolArray) -> FloatArray:
    """Subtract the mean of each iteration's known values; unknown values become 0."""
    counts = np.maximum(known.sum(1, keepdims=True), 1)
    return np.where(known, values - np.where(known, values, 0.0).sum(1, keepdims=True) / counts, 0.0)
