"""The part of each worker's iteration that its batch size does not change, from the iterations of a run.

Sizes follow the load, so times at small and at large sizes are of different loads. Only where equal sizes begin or end,
at the start of a run and at comparisons, does the size change for no reason of the load's. Times on both sides are
compared there. What one worker shows is noisy, and all train one model: each estimate is moved to the mean of all by
the part of their spread that noise explains (DerSimonian and Laird's random effects, 1986).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

import numpy as np

from evenstep.report.iterations import Iterations

_WINDOW: Final = 10
_LEAST_SPREAD: Final = 1.2
_LARGEST: Final = 0.95
_LEAST_VARIANCE: Final = 1e-6
_LEAST_SECONDS: Final = 1e-6
_MEDIANS: Final = np.pi / 2
"""The variance of a median over that of a mean."""
_CHANGES: Final = 0.954
"""The median of |difference of two normals| over their standard deviation."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Middle:
    """The medians of a few iterations in a row, and the variance of the logarithm of their seconds."""

    samples: float
    seconds: float
    variance: float


def fixed_shares(workers: Sequence[Iterations], equal: float) -> list[float] | None:
    """The fixed part of each worker's time at `equal` samples, 0 to 0.95; None if no worker shows any."""
    found = [_shown(done, equal) for done in workers]
    if any(each is not None for each in found):
        return _pooled(found)
    # Without comparisons, as on servers, the workers' own fits say most.
    fits = [_fitted(done, equal) for done in workers]
    known = [share for share in fits if share is not None]
    middle = float(np.median(known)) if known else 0.0
    return [_clipped(middle if share is None else share) for share in fits] if known else None


def _shown(done: Iterations, equal: float) -> tuple[float, float] | None:
    """A worker's fixed part and the variance of this estimate; None if its sizes varied too little."""
    edges = [0, *(np.flatnonzero(np.diff(done.basis)) + 1).tolist(), len(done)]
    found = []
    for first, at, last in zip(edges, edges[1:], edges[2:], strict=False):
        before, after = _middle(done, max(first, at - _WINDOW), at), _middle(done, at, min(last, at + _WINDOW))
        found += _compared(before, after, equal)
    if not found:
        return None
    shares, variances = np.array(found).T
    return float(np.average(shares, weights=1 / variances)), float(1 / (1 / variances).sum())


def _compared(before: _Middle, after: _Middle, equal: float) -> list[tuple[float, float]]:
    """The fixed part that two stretches of unlike sizes show, and its variance; none if their sizes are too alike."""
    small, large = sorted((before, after), key=lambda each: each.samples)
    if not small.samples or large.samples < _LEAST_SPREAD * small.samples:
        return []
    slope = (large.seconds - small.seconds) / (large.samples - small.samples)
    whole = large.seconds + slope * (equal - large.samples)
    if whole <= 0:
        return []
    # The share is a function of the logarithm of the ratio of both times; this is how fast it changes with it.
    steepness = large.seconds / whole * equal / (large.samples - small.samples)
    variance = steepness**2 * (small.variance + large.variance)
    return [(1 - slope * equal / whole, max(variance, _LEAST_VARIANCE))]


def _middle(done: Iterations, first: int, last: int) -> _Middle:
    seconds = np.maximum(done.compute_seconds[first:last], _LEAST_SECONDS)
    changes = np.abs(np.diff(np.log(done.compute_seconds.clip(_LEAST_SECONDS))))
    # Of a few iterations the spread is not known well: it is no less than that of the run from one to the next.
    spread = max(float(np.log(seconds).std()), float(np.median(changes)) / _CHANGES)
    return _Middle(
        samples=float(np.median(done.samples[first:last])),
        seconds=float(np.median(seconds)),
        variance=_MEDIANS * spread**2 / len(seconds),
    )


def _pooled(found: Sequence[tuple[float, float] | None]) -> list[float]:
    """Each worker's estimate, moved to the mean of all by what noise explains; the mean where there is none."""
    shares, variances = np.array([each for each in found if each is not None]).T
    weights = 1 / variances
    mean = np.dot(weights, shares) / weights.sum()
    beyond = np.dot(weights, (shares - mean) ** 2) - (len(shares) - 1)
    spread = max(beyond / (weights.sum() - np.dot(weights, weights) / weights.sum()), 0.0) if len(shares) > 1 else 0.0
    middle = np.average(shares, weights=1 / (variances + spread))
    return [
        _clipped(middle if each is None else (each[0] * spread + middle * each[1]) / (spread + each[1]))
        for each in found
    ]


def _fitted(done: Iterations, equal: float) -> float | None:
    fixed, slope = float(done.fixed[-1]), float(done.pace[-1])
    return fixed / (fixed + slope * equal) if fixed > 0 and slope > 0 else None


def _clipped(share: float) -> float:
    return float(np.clip(share, 0.0, _LARGEST))
