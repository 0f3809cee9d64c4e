"""Fragments, the parts of a model that workers average at different times, and the weight of each worker there."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from evenstep.core.samples.share import Share
from evenstep.core.values import FloatArray


def due_fragments(share: Share, period: int, fragments: int = 1) -> tuple[int, ...]:
    """The fragments that are averaged after this iteration.

    Each is at every `period`-th iteration of an epoch, fragment f of F shifted by floor(f period / F), and all are at
    its end (Streaming DiLoCo, arXiv 2501.18512). Counted within the epoch, so that a resumed run averages alike.
    """
    return tuple(range(fragments)) if share.ends_epoch else _meeting(share.iteration, period, fragments)


def leaving_fragments(share: Share, period: int, fragments: int = 1, delay: int = 0) -> tuple[int, ...]:
    """The fragments whose exchange begins after this iteration, `delay` iterations before they are averaged.

    None if it only begins when they are averaged, and at the end of an epoch. If the epoch ends before, it was for
    nothing.
    """
    return _meeting(share.iteration + delay, period, fragments) if delay and not share.ends_epoch else ()


def _meeting(iteration: int, period: int, fragments: int) -> tuple[int, ...]:
    return tuple(f for f in range(fragments) if (iteration + 1 - f * period // fragments) % period == 0)


def weights_of(units: FloatArray) -> FloatArray:
    """The weight of each worker in an average, by its samples or units since the last one; float64, shape [workers].

    Args:
        units: At least 0; NaN for a worker that does not count. If all are 0, those that count have equal weights.

    Returns:
        Weights that sum to 1, or zeros if no worker counts.

    >>> [weights_of(np.array(units)).tolist() for units in ([3, 1, np.nan], [0, 0, np.nan], [np.nan, np.nan])]
    [[0.75, 0.25, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0]]
    """
    counts = np.nan_to_num(units) if np.nansum(units) else (~np.isnan(units)).astype(np.float64)
    return counts / (counts.sum() or 1.0)


def cut_into_fragments(sizes: Sequence[int], fragments: int) -> list[int]:
    """The fragment, 0 to `fragments` - 1, of each tensor by the tensors' sizes in bytes.

    Neighbours stay together. A tensor is in the fragment that would hold its middle if all had equally many bytes,
    unless one would then be empty; there must be as many tensors as fragments.

    >>> cut_into_fragments([4, 4, 4, 4, 8], 2)
    [0, 0, 0, 1, 1]
    >>> cut_into_fragments([90, 1, 1], 3)
    [0, 1, 2]
    """
    found: list[int] = []
    total, spare = sum(sizes) or 1, fragments - len(sizes)
    for number, (size, end) in enumerate(zip(sizes, accumulate(sizes), strict=True)):
        middle = (2 * end - size) * fragments // (2 * total)
        found.append(max(spare + number, min(middle, fragments - 1, found[-1] + 1 if found else 0)))
    return found
