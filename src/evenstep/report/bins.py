"""Many values over time as few: their least, mean and largest in each of many equal stretches."""

from dataclasses import dataclass
from typing import final

import numpy as np

from evenstep.report.iterations import FloatArray


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Bins:
    """Stretches that hold any value, in order; all of shape [stretches]. `x` is the mean place of the values."""

    x: FloatArray
    least: FloatArray
    mean: FloatArray
    largest: FloatArray


def binned(x: FloatArray, y: FloatArray, most: int, weights: FloatArray | None = None) -> Bins:
    """At most so many stretches of values `y` at ascending places `x`; as they are where there are no more than that.

    The mean is weighted, where weights are given; values that are no numbers, and those without weight, are left out.
    """
    counts = np.isfinite(y) if weights is None else np.isfinite(y) & (weights > 0)
    x, y = x[counts], y[counts]
    weight = np.ones_like(y) if weights is None else weights[counts]
    if len(y) <= most:
        return Bins(x=x, least=y, mean=y, largest=y)
    width = (x[-1] - x[0]) / most or 1.0
    index = np.minimum(((x - x[0]) / width).astype(np.int64), most - 1)
    starts = np.flatnonzero(np.diff(index, prepend=-1))
    total = np.add.reduceat(weight, starts)
    return Bins(
        x=np.add.reduceat(x, starts) / np.diff(starts, append=len(x)),
        least=np.minimum.reduceat(y, starts),
        mean=np.add.reduceat(y * weight, starts) / total,
        largest=np.maximum.reduceat(y, starts),
    )
