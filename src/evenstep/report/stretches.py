"""A run over time in few values: one for each of many equal stretches to draw."""

from dataclasses import dataclass
from typing import final

import numpy as np

from evenstep.report.account.account import Part
from evenstep.report.iterations import FloatArray, Iterations


def shares(done: Iterations, edges: FloatArray) -> dict[Part, FloatArray]:
    """The share of each part in a worker's time between neighbouring edges, 0 to 1, of shape [edges - 1].

    Time between iterations (an evaluation, a pause) is in no part. The shares are exact for any edges: each part's
    seconds up to a time are a piecewise linear function, which is interpolated.
    """
    seconds = np.stack(list(done.parts.values()), axis=1)
    ends = done.began[:, np.newaxis] + np.cumsum(seconds, axis=1)
    # An iteration's parts may overlap the next one's start by the clock's last digits.
    times = np.maximum.accumulate(np.column_stack([done.began, ends]).ravel()).reshape(len(done), -1)
    result = {}
    for index, part in enumerate(Part):
        grown = np.concatenate([[0.0], np.cumsum(seconds[:, index])])
        # They grow from the start of the part in each iteration to its end, and stay until the next.
        spent = np.interp(edges, times[:, index : index + 2].ravel(), np.column_stack([grown[:-1], grown[1:]]).ravel())
        result[part] = np.clip(np.diff(spent) / np.diff(edges), 0.0, 1.0)
    return result


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Bins:
    """The stretches that hold any value, in order; all of shape [stretches]. `x` is the mean place of the values."""

    x: FloatArray
    least: FloatArray
    mean: FloatArray
    largest: FloatArray


def binned(x: FloatArray, y: FloatArray, most: int, weights: FloatArray | None = None) -> Bins:
    """Bin values `y` at ascending places `x` into at most `most` stretches; keep the values if there are no more.

    The mean is weighted if there are weights; values that are not finite, or have no weight, are left out.
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
