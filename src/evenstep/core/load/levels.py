"""The loads of all workers relative to each other, from the blocks of iterations that they have reported.

A worker's own estimator can tell its load neither from what slows all workers nor from a wrong fixed part. Workers that
are looked at together can: what slows all of them cancels, and loads seldom change in the same block as sizes.
"""

from dataclasses import dataclass, field
from math import isqrt
from typing import Final, NamedTuple, final

import numpy as np
import numpy.typing as npt

from evenstep.core.load.solver import Lines
from evenstep.core.state import Stateful
from evenstep.core.values import IntArray

_PPM: Final = 1_000_000
_LONGEST: Final = 9 * 10**9
_LARGEST_RATE: Final = 10**12
_LARGEST_FIXED: Final = 10**15
_LARGEST_LOAD: Final = 10**8
_FIXED_EIGHTHS: Final = (0, 1, 2, 4, 8, 16, 32, 64)
_MOST_PAIRS: Final = 16
_BEFORE: Final = 4
_AFTER: Final = 2
_SAME: Final = 50
_APART: Final = 10
_SURE: Final = 3
_FIRST_NOISE: Final = 300_000
_LEAST_NOISE: Final = 10_000
_LITTLE_NOISE: Final = 50_000
_MOST_MISFIT: Final = 9 * _PPM
_CAP: Final = 8
_QUARTER: Final = 4


class Pair(NamedTuple):
    """The means of the blocks directly before and after a change of sizes, of shape [2, workers], and their numbers."""

    before: IntArray
    blocks_before: int
    after: IntArray
    blocks_after: int


@final
@dataclass(slots=True)
class Levels(Stateful):
    """Follows the loads of all workers, and finds a fixed part that all of them share.

    A worker's *load* in a block is its time over that of its time model, relative to the mean of all workers. The
    *level* is the mean load since the last change of load: two blocks in a row outside the noise, on the same side.

    The time models are those that the workers report. If one fixed part for all workers explains the changes of size so
    far better by three standard deviations, it is used instead. It explains a change of sizes if loads are the same
    before and after it. A misfit counts as three standard deviations at most: where the load has changed with the
    sizes, a pair of blocks says nothing.

    Attributes:
        times: The time models, in proportion to the levels: their unit is not known. None before the first block.
    """

    times: Lines | None = field(init=False, default=None)
    _models: Lines | None = field(init=False, default=None)  # The time models to which the loads refer.
    _loads: list[IntArray] = field(init=False, default_factory=list)  # Of the window's blocks.
    _steps: list[int] = field(init=False, default_factory=list)  # Squared changes between blocks of the same sizes.
    _since: int = field(init=False, default=0)  # Blocks since the last change of load.
    _run: int = field(init=False, default=0)  # Blocks since the last change of sizes.
    _pairs: list[Pair] = field(init=False, default_factory=list)
    _shared: int | None = field(init=False, default=None)  # The fixed part of all workers, in eighths of a share.

    def observe(self, window: list[IntArray], reported: Lines) -> None:
        """Take in the last block of the window; of each block, samples and microseconds, of shape [2, workers]."""
        if len(window) == 1:
            self._since, self._run, self._shared, self._models = 0, 0, None, None
            self._pairs.clear()
        before, same = self._run, len(window) == 1 or bool(_alike(window[-1][0], window[-2][0], _SAME))
        self._run = before + 1 if same else 1
        self._since = min(self._since + 1, len(window))
        if self._note_pair(window, before):
            noise = self._noise()
            self._shared = self._explaining(reported, window[-1], noise) if noise > _LITTLE_NOISE else None
            self._models = None
        models, own = self._models, self._shared is None
        if models is None or not same or (own and not _same_shape(models, reported)):
            models = reported if self._shared is None else _sharing(self._shared, reported, window[-1])
            self._refer(window, models)
        else:
            self._loads = [*self._loads[1 - len(window) :], _loads(window[-1][None], models)[0]]
            self._steps = [*self._steps[1 - len(window) :], _square(self._loads[-1], self._loads[-2])]
        self.times = _scaled(models, self._followed(self._noise()))

    def _refer(self, window: list[IntArray], models: Lines) -> None:
        """Refer the loads to these models."""
        rows = np.array(window)
        loads = _loads(rows, models)
        same = _alike(rows[1:, 0], rows[:-1, 0], _SAME)
        self._models, self._loads = models, list(loads)
        self._steps = [_square(loads[k + 1], loads[k]) for k in np.flatnonzero(same).tolist()]

    def _note_pair(self, window: list[IntArray], blocks: int) -> bool:
        """Note the blocks before and after a change of sizes, the latter once more when there are two of them."""
        row = window[-1]
        if self._run == 1 and len(window) > 1 and not _alike(row[0], window[-2][0], _APART):
            before = window[-1 - min(max(blocks, 1), _BEFORE) : -1]
            self._pairs.append(Pair(_mean(before), len(before), row, 1))
            del self._pairs[:-_MOST_PAIRS]
            return True
        if self._run == _AFTER and self._pairs and _alike(row[0], self._pairs[-1].after[0], _SAME):
            self._pairs[-1] = self._pairs[-1]._replace(after=(row + window[-2]) // 2, blocks_after=2)
            return True
        return False

    def _noise(self) -> int:
        """The standard deviation of a load in millionths, from neighbouring blocks of the same sizes.

        A change of load is no noise: each difference counts as at most eight times their lower quartile.
        """
        steps = self._steps
        if not steps:
            return _FIRST_NOISE
        most = _CAP**2 * max(sorted(steps)[len(steps) // _QUARTER], _LEAST_NOISE**2)
        total = _FIRST_NOISE**2 // 2 + 2 * sum(min(step, most) for step in steps)
        return max(isqrt(total // (4 * len(steps) + 1)), _LEAST_NOISE)

    def _explaining(self, reported: Lines, row: IntArray, noise: int) -> int | None:
        """The fixed part that explains the changes of size; None if what is reported does it well enough."""
        misfits = {each: self._misfit(_sharing(each, reported, row), noise) for each in _FIXED_EIGHTHS}
        best = min(misfits, key=misfits.__getitem__)
        return best if misfits[best] + _MOST_MISFIT < self._misfit(reported, noise) else None

    def _misfit(self, models: Lines, noise: int) -> int:
        """How much loads change with the sizes: the sum of squares, in millionths of the variance."""
        before = _loads(np.array([pair.before for pair in self._pairs]), models)
        after = _loads(np.array([pair.after for pair in self._pairs]), models)
        squares: list[int] = ((_change(after, before) ** 2).sum(axis=1) // before.shape[1]).tolist()
        misfit = 0
        for square, pair in zip(squares, self._pairs, strict=True):
            # The variance of the difference of two means, times both numbers of blocks.
            variance = noise**2 * (pair.blocks_before + pair.blocks_after)
            misfit += min(square * pair.blocks_before * pair.blocks_after * _PPM // variance, _MOST_MISFIT)
        return misfit

    def _followed(self, noise: int) -> IntArray:
        """The levels, in millionths of their mean."""
        count = self._since - 2
        if count >= 2:
            mean = _mean(self._loads[-self._since : -2])
            changes = [_change(each, mean) for each in self._loads[-2:]]
            far = _SURE * isqrt(noise * noise * (count + 1) // count)
            if ((np.minimum(*changes) > far) | (np.maximum(*changes) < -far)).any():
                # The change came in the middle of the earlier one if they differ by more than the noise.
                self._since = 1 if (np.abs(_change(*self._loads[-2:])) > _SURE * noise).any() else 2
        latest = self._loads[-self._since :]
        if len(latest) > 2:
            usual = _mean(latest[:-1])
            far = _SURE * isqrt(noise * noise * len(latest) // (len(latest) - 1))
            if (np.abs(_change(latest[-1], usual)) > far).any():
                return usual
        return _mean(latest)


def _alike(sizes: IntArray, others: IntArray, part: int) -> npt.NDArray[np.bool_]:
    """Whether no size differs by more than this part (one in `part`)."""
    return np.asarray((np.abs(sizes - others) * part <= others).all(axis=-1))


def _change(now: IntArray, before: IntArray) -> IntArray:
    """Relative to the mean of both, in millionths."""
    change: IntArray = 2 * (now - before) * _PPM // (now + before)
    return change


def _loads(rows: IntArray, models: Lines) -> IntArray:
    """Loads by block and worker in millionths of the mean of all workers, at least 1; rows are [blocks, 2, workers]."""
    expected = np.maximum(models.nanoseconds(rows[:, 0]), 1)
    loads = np.minimum(np.minimum(rows[:, 1], _LONGEST) * 1000 * _PPM // expected, _LARGEST_LOAD)
    means = np.maximum(loads.sum(axis=1, keepdims=True) // loads.shape[1], 1)
    relative: IntArray = np.maximum(loads * _PPM // means, 1)
    return relative


def _square(now: IntArray, before: IntArray) -> int:
    """The mean square of the changes of load."""
    return int((_change(now, before) ** 2).sum()) // len(now)


def _mean(rows: list[IntArray]) -> IntArray:
    mean: IntArray = np.add.reduce(rows) // len(rows)
    return mean


def _same_shape(models: Lines, others: Lines) -> bool:
    """Whether the fixed parts, to a 64th of a sample, and the flat starts are the same."""
    one, other = (64 * each.fixed // each.per_sample for each in (models, others))
    return np.array_equal(one, other) and np.array_equal(models.flat, others.flat)


def _sharing(eighths: int, reported: Lines, row: IntArray) -> Lines:
    """The models with this fixed part that give the samples of the block the times that the reported models give."""
    samples, units = row[0], 8 * row.shape[1]
    fixed = eighths * int(samples.sum())
    weights = (units * np.maximum(samples, reported.flat) + fixed).tolist()
    times = reported.nanoseconds(samples).tolist()
    return Lines(
        per_sample=np.array([max(units * time // weight, 1) for time, weight in zip(times, weights, strict=True)]),
        fixed=np.array([fixed * time // weight for time, weight in zip(times, weights, strict=True)]),
        flat=reported.flat,
    )


def _scaled(models: Lines, levels: IntArray) -> Lines:
    """Each worker's times by its level, within what a worker may report."""
    per_sample, fixed = (
        np.array([each * level // _PPM for each, level in zip(values.tolist(), levels.tolist(), strict=True)])
        for values in (models.per_sample, models.fixed)
    )
    return Lines(
        per_sample=np.clip(per_sample, 1, _LARGEST_RATE), fixed=np.minimum(fixed, _LARGEST_FIXED), flat=models.flat
    )
