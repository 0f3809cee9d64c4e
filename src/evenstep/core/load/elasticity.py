"""Which part of a worker's time follows the size of its batch, from iterations in which sizes changed by much."""

from collections import deque
from collections.abc import Iterable
from typing import Final, TypeAlias, final

import numpy as np
import numpy.typing as npt

FloatArray: TypeAlias = npt.NDArray[np.float64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]

_GRID: Final = np.linspace(0.0, 1.0, 401)
_ENDS: Final = 20.0
"""How many times as likely as any other point each end is beforehand, 5 % together: both are common."""
_BEFORE: Final = 4
_CHANGED: Final = float(np.log(1.2))
_ALIKE: Final = float(np.log(1.1))
_STEADY: Final = 2.0
_OFF: Final = 3.0
_NOT_A_LINE: Final = 0.03
"""How far a device's times may be off the line that they are taken to follow."""
_MOST: Final = 20
"""That error is the same in many iterations, so more than these count as these many."""
_KEPT: Final = 512
_LEAST_KEPT: Final = 16
_BINS: Final = np.geomspace(1e-3, 10.0, 100)
_WARMING: Final = 0.05
"""How differently workers warm up in their second iteration, relative to its time."""
_UNKNOWN_NOISE: Final = 0.2
_TAIL: Final = 0.8
"""Noise is measured by the changes that so many others do not exceed, as it often has longer tails than normal ..."""
_CHANGES: Final = 1.812
"""... for which that part of |difference of two| is below so many times their standard deviation."""


@final
class Elasticity:
    """Takes each worker's iterations in their order; memory does not grow with them.

    A worker takes s (1 - e + e x) seconds for x equal shares. A slowdown scales s and leaves its elasticity e, 0 to 1,
    as it is. An iteration tells of e if its size differs by more than a fifth from the mean of the four before it, or
    of as many as there are, whose times agree. Sizes follow times: a worker gets less after a slow iteration, which
    faster ones follow anyway, so that a single time before the change would show too large an e. If the load has
    changed just before, the times before that would show too small a one.

    How likely each e is follows from how well it predicts these iterations, against the noise where sizes stay. What
    is off by more than three times the noise counts as that much, since loads change and spikes come. All workers train
    one model, so the others count too, together as much as one of them.

    Each worker's first iteration only warms up. Sizes often change after the second one, which may still be slow: from
    there to the third, times count by how they differ from those of the other workers.
    """

    def __init__(self, workers: int) -> None:
        self._begun: list[bool] = []
        self._latest = np.empty((0, 2, _BEFORE))  # Logarithms of seconds, and of sizes.
        self._changes = np.empty((0, len(_BINS) + 1))  # How often seconds changed by how much at alike sizes.
        self._pair = np.empty((0, 2, 2))  # Of seconds and sizes, in the second iteration and the third.
        self._told: list[deque[FloatArray]] = []
        self.add(workers)

    def add(self, workers: int) -> None:
        """Add so many workers after those that are known."""
        self._begun += [False] * workers
        self._latest = np.concatenate([self._latest, np.full((workers, 2, _BEFORE), np.nan)])
        self._changes = np.concatenate([self._changes, np.zeros((workers, len(_BINS) + 1))])
        self._pair = np.concatenate([self._pair, np.full((workers, 2, 2), np.nan)])
        kept = max(_KEPT // max(len(self._begun), 1), _LEAST_KEPT)
        self._told += [deque[FloatArray](maxlen=kept) for _ in range(workers)]

    def observe(self, worker: int, seconds: FloatArray, sizes: FloatArray) -> None:
        """Add iterations of a worker, shape [iterations]: seconds > 0, and sizes > 0 in equal shares."""
        begins = int(len(seconds) > 0 and not self._begun[worker])
        self._begun[worker] |= len(seconds) > 0
        if len(seconds) == begins:
            return
        both = np.concatenate([self._latest[worker], np.log([seconds[begins:], sizes[begins:]])], axis=1)
        self._latest[worker] = both[:, -_BEFORE:]
        changed = np.abs(np.diff(both[:, _BEFORE - 1 :], axis=1))
        alike = changed[0, changed[1] < _ALIKE]
        self._changes[worker] += np.bincount(np.searchsorted(_BINS, alike), minlength=len(_BINS) + 1)
        windows = np.lib.stride_tricks.sliding_window_view(both, _BEFORE + 1, axis=1).transpose(1, 0, 2)
        known = np.isfinite(windows[:, 1, :-1]).sum(axis=1)
        usual = np.nansum(windows[:, 1, :-1], axis=1) / np.maximum(known, 1)
        if (known == 1).any():
            self._pair[worker] = windows[known == 1][0, :, -2:]
        self._told[worker].extend(windows[(known > 1) & (np.abs(windows[:, 1, -1] - usual) > _CHANGED)])

    @property
    def noise(self) -> FloatArray:
        """The usual relative error of each worker's seconds, shape [workers]."""
        all_changes = self._changes.sum(axis=0)
        changes = np.where(self._changes.sum(axis=1, keepdims=True) < _BEFORE, all_changes, self._changes)
        below = np.cumsum(changes, axis=1)
        middle = (below < below[:, -1:] * _TAIL).sum(axis=1)
        return np.where(all_changes.any(), _BINS[np.minimum(middle, len(_BINS) - 1)] / _CHANGES, _UNKNOWN_NOISE)

    @property
    def known(self) -> bool:
        """Whether any iteration has told something."""
        return bool(self._losses()[1].any())

    @property
    def medians(self) -> FloatArray:
        """For each worker, what is as likely too large as too small; 0.5 as long as nothing is known."""
        return np.asarray(self.quantiles(np.array([0.5]))[0])

    def quantiles(self, parts: FloatArray) -> FloatArray:
        """The elasticities below which the true ones are with these probabilities, shape [parts, workers]."""
        losses, told = self._losses()
        others = losses.sum(axis=0) - losses
        losses = losses + others / np.maximum(told.sum() - told, 1)[:, np.newaxis]
        likely = np.exp(losses.min(axis=1, keepdims=True) - losses)
        likely[:, [0, -1]] *= _ENDS
        below = np.cumsum(likely / likely.sum(axis=1, keepdims=True), axis=1)
        return np.array([_GRID[np.searchsorted(each, parts)] for each in below]).T

    def _losses(self) -> tuple[FloatArray, BoolArray]:
        """How unlikely each elasticity of the grid makes what each worker did, and whether it tells of that at all."""
        pairs = zip(self._told, self.noise.tolist(), strict=True)
        losses, told = map(np.array, zip(*(_loss(told, noise) for told, noise in pairs), strict=True))
        seconds, sizes = self._pair[..., np.newaxis].transpose(1, 2, 0, 3)
        here = np.isfinite(seconds[1, :, 0]) & (np.isfinite(seconds[1]).sum() > 1)
        if here.any():
            off = np.diff(seconds - _longer(sizes), axis=0)[0]
            off -= np.median(off[here], axis=0)
            tells = here & (np.abs(sizes[1] - sizes[0])[:, 0] > _CHANGED)
            variance = 2 * self.noise**2 + _NOT_A_LINE**2 + _WARMING**2
            losses[tells] += np.minimum(off**2 / variance[:, np.newaxis], _OFF**2)[tells] / 2
            told |= tells
        return losses, told


def _longer(sizes: FloatArray) -> FloatArray:
    """The logarithm of how many times as long as one of an equal share sizes take, by elasticity, the last axis."""
    return np.asarray(np.log(1 - _GRID + _GRID * np.exp(sizes)))


def _loss(events: Iterable[FloatArray], noise: float) -> tuple[FloatArray, bool]:
    """How unlikely each elasticity makes what a worker did, and whether any iteration tells of that."""
    windows = np.array(list(events)).reshape(-1, 2, _BEFORE + 1)
    seconds, sizes = np.diff(windows[:, :, :-1], axis=2).transpose(1, 0, 2)
    # Each time differs from the one before by no more than what the sizes may explain, and the noise.
    off = np.abs(seconds - np.clip(seconds, np.minimum(sizes, 0.0), np.maximum(sizes, 0.0)))
    windows = windows[~(off > _STEADY * np.sqrt(2) * noise).any(axis=1)]
    paces = windows[:, 0, :, np.newaxis] - _longer(windows[:, 1, :, np.newaxis])
    known = np.isfinite(windows[:, 0, :-1]).sum(axis=1)[:, np.newaxis]
    off = paces[:, -1] - np.nansum(paces[:, :-1], axis=1) / known
    loss = np.minimum(off**2 / (noise**2 * (1 + 1 / known) + _NOT_A_LINE**2), _OFF**2).sum(axis=0) / 2
    return loss * min(_MOST / max(len(windows), 1), 1.0), len(windows) > 0
