"""Estimates which part of a worker's time follows its batch size, from iterations in which sizes changed much."""

from collections import deque
from collections.abc import Iterable
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import Final, final

import numpy as np

from evenstep.core.values import BoolArray, FloatArray

_GRID: Final = np.linspace(0.0, 1.0, 401)
"""The elasticities whose likelihood is followed."""
_BINS: Final = np.geomspace(1e-3, 10.0, 100)
"""Of the histogram of changes of logarithms, by which noise is known: 10 % apart."""


@final
@dataclass(eq=False)
class Elasticity:
    """Takes each worker's iterations in their order; memory does not grow with them.

    A worker takes s (1 - e + e x) seconds for x equal shares. A slowdown scales s and does not change the elasticity e,
    0 to 1. An iteration is informative about e if its size differs by more than a fifth from the mean of the previous
    four (or as many as there are) and their times agree. Sizes follow times: a worker gets less after a slow iteration,
    which faster ones follow anyway, so a single time before the change would make e too large. If the load has changed
    just before, the times before that would make it too small.

    The likelihood of each e follows from how well it predicts these iterations, relative to the noise where sizes stay.
    Errors are cut off at three times the noise, since loads change and spikes come. All workers train one model, so the
    other workers count too, together as much as one of them.

    Each worker's first iteration only warms up. Sizes often change after the second one, which may still be slow, so
    from there to the third, times count by their difference from those of the other workers.

    Args:
        workers: The number of workers.
        proportional: Whether each e is known to be 1: sizes are numbers of batches that take as long each.
        before: The number of iterations whose mean an iteration is compared with.
        ends: The prior weight of each end relative to any other point, 5 % together: both are common.
        changed: A size that differs by this factor tells something ...
        alike: ... and one that differs by less than this factor shows the noise.
        steady: The times before agree if they differ by no more than this many standard deviations.
        off: Errors count as at most this many standard deviations.
        curved: The relative error of a device's times around the line that they are assumed to follow.
        repeats: That error repeats from iteration to iteration, so more iterations than this count as this many.
        warming: The difference between workers' warm-up in the second iteration, relative to its time.
        unknown: The noise while none is known.
        kept: The iterations that are kept of all workers together, and at least of each.
    """

    workers: InitVar[int]
    _: KW_ONLY
    proportional: bool = False
    before: int = 4
    ends: float = 20.0
    changed: float = 1.2
    alike: float = 1.1
    steady: float = 2.0
    off: float = 3.0
    curved: float = 0.03
    repeats: int = 20
    warming: float = 0.05
    unknown: float = 0.2
    kept: tuple[int, int] = (512, 16)

    def __post_init__(self, workers: int) -> None:
        self._begun: list[bool] = []
        self._latest = np.empty((0, 2, self.before))  # Logarithms of seconds, and of sizes.
        self._changes = np.empty((0, len(_BINS) + 1))  # A histogram of the changes of seconds at similar sizes.
        self._pair = np.empty((0, 2, 2))  # Seconds and sizes in the second iteration and the third.
        self._told: list[deque[FloatArray]] = []
        self.add(workers)

    def add(self, workers: int) -> None:
        """Add this many workers after the known ones."""
        self._begun += [False] * workers
        self._latest = np.concatenate([self._latest, np.full((workers, 2, self.before), np.nan)])
        self._changes = np.concatenate([self._changes, np.zeros((workers, len(_BINS) + 1))])
        self._pair = np.concatenate([self._pair, np.full((workers, 2, 2), np.nan)])
        kept = max(self.kept[0] // max(len(self._begun), 1), self.kept[1])
        self._told += [deque[FloatArray](maxlen=kept) for _ in range(workers)]

    def observe(self, worker: int, seconds: FloatArray, sizes: FloatArray) -> None:
        """Add iterations of a worker, shape [iterations]: seconds > 0, and sizes > 0 in equal shares."""
        begins = int(len(seconds) > 0 and not self._begun[worker])
        self._begun[worker] |= len(seconds) > 0
        if len(seconds) == begins:
            return
        both = np.concatenate([self._latest[worker], np.log([seconds[begins:], sizes[begins:]])], axis=1)
        self._latest[worker] = both[:, -self.before :]
        changed = np.abs(np.diff(both[:, self.before - 1 :], axis=1))
        alike = changed[0, changed[1] < np.log(self.alike)]
        self._changes[worker] += np.bincount(np.searchsorted(_BINS, alike), minlength=len(_BINS) + 1)
        windows = np.lib.stride_tricks.sliding_window_view(both, self.before + 1, axis=1).transpose(1, 0, 2)
        known = np.isfinite(windows[:, 1, :-1]).sum(axis=1)
        usual = np.nansum(windows[:, 1, :-1], axis=1) / np.maximum(known, 1)
        if (known == 1).any():
            self._pair[worker] = windows[known == 1][0, :, -2:]
        self._told[worker].extend(windows[(known > 1) & (np.abs(windows[:, 1, -1] - usual) > np.log(self.changed))])

    @property
    def noise(self) -> FloatArray:
        """The usual relative error of each worker's seconds, shape [workers]."""
        all_changes = self._changes.sum(axis=0)
        changes = np.where(self._changes.sum(axis=1, keepdims=True) < self.before, all_changes, self._changes)
        below = np.cumsum(changes, axis=1)
        # The 80 % quantile, as noise often has longer tails than a normal distribution, for which that quantile of
        # |difference of two| is 1.812 standard deviations.
        middle = (below < below[:, -1:] * 0.8).sum(axis=1)
        return np.where(all_changes.any(), _BINS[np.minimum(middle, len(_BINS) - 1)] / 1.812, self.unknown)

    @property
    def known(self) -> bool:
        """True if any iteration was informative, or none need be."""
        return self.proportional or bool(self._losses()[1].any())

    @property
    def medians(self) -> FloatArray:
        """The median elasticity of each worker; 0.5 while nothing is known."""
        return np.asarray(self.quantiles(np.array([0.5]))[0])

    def quantiles(self, parts: FloatArray) -> FloatArray:
        """The quantiles of each worker's elasticity at these probabilities, shape [parts, workers]."""
        if self.proportional:
            return np.ones([len(parts), len(self._begun)])
        losses, told = self._losses()
        others = losses.sum(axis=0) - losses
        losses = losses + others / np.maximum(told.sum() - told, 1)[:, np.newaxis]
        likely = np.exp(losses.min(axis=1, keepdims=True) - losses)
        likely[:, [0, -1]] *= self.ends
        below = np.cumsum(likely / likely.sum(axis=1, keepdims=True), axis=1)
        return np.array([_GRID[np.searchsorted(each, parts)] for each in below]).T

    def _losses(self) -> tuple[FloatArray, BoolArray]:
        """The loss of each elasticity of the grid given each worker's times, and whether any time is informative."""
        pairs = zip(self._told, self.noise.tolist(), strict=True)
        losses, told = map(np.array, zip(*(self._loss(told, noise) for told, noise in pairs), strict=True))
        seconds, sizes = self._pair[..., np.newaxis].transpose(1, 2, 0, 3)
        here = np.isfinite(seconds[1, :, 0]) & (np.isfinite(seconds[1]).sum() > 1)
        if here.any():
            off = np.diff(seconds - _longer(sizes), axis=0)[0]
            off -= np.median(off[here], axis=0)
            tells = here & (np.abs(sizes[1] - sizes[0])[:, 0] > np.log(self.changed))
            variance = 2 * self.noise**2 + self.curved**2 + self.warming**2
            losses[tells] += np.minimum(off**2 / variance[:, np.newaxis], self.off**2)[tells] / 2
            told |= tells
        return losses, told

    def _loss(self, events: Iterable[FloatArray], noise: float) -> tuple[FloatArray, bool]:
        """The loss of each elasticity given a worker's times, and whether any iteration is informative."""
        windows = np.array(list(events)).reshape(-1, 2, self.before + 1)
        seconds, sizes = np.diff(windows[:, :, :-1], axis=2).transpose(1, 0, 2)
        # Each time differs from the previous one by no more than the sizes may explain, and the noise.
        off = np.abs(seconds - np.clip(seconds, np.minimum(sizes, 0.0), np.maximum(sizes, 0.0)))
        windows = windows[~(off > self.steady * np.sqrt(2) * noise).any(axis=1)]
        paces = windows[:, 0, :, np.newaxis] - _longer(windows[:, 1, :, np.newaxis])
        known = np.isfinite(windows[:, 0, :-1]).sum(axis=1)[:, np.newaxis]
        off = paces[:, -1] - np.nansum(paces[:, :-1], axis=1) / known
        loss = np.minimum(off**2 / (noise**2 * (1 + 1 / known) + self.curved**2), self.off**2).sum(axis=0) / 2
        return loss * min(self.repeats / max(len(windows), 1), 1.0), len(windows) > 0


def _longer(sizes: FloatArray) -> FloatArray:
    """The logarithm of the time of each size over that of an equal share, by elasticity (the last axis)."""
    return np.asarray(np.log(1 - _GRID + _GRID * np.exp(sizes)))
