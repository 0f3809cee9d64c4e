"""The factor by which a run was faster than with equal sizes, from the measurements of its iterations."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

import numpy as np

from evenstep.core.load.elasticity import Elasticity
from evenstep.core.values import BoolArray, FloatArray

if TYPE_CHECKING:
    from evenstep.report.account.account import Meetings

_AT_ONCE: Final = 4096  # Iterations taken in one step, which bounds its memory.
_LEVELS: Final = 40  # Quantiles of the elasticities, each of which gets as many draws.
_DRAWS: Final = 10 * _LEVELS  # 20 of them lie outside of the interval.
_FAR: Final = 3.0  # Times the iteration before: slowness is seldom that sudden, and compiling takes seconds.
_COLUMNS: Final = 5  # Of an iteration as a whole.


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate with its 95 % interval."""

    low: float
    estimate: float
    high: float

    @property
    def ends(self) -> str:
        """The ends, as `1.20 to 1.35`; empty if they are the same to two digits."""
        low, high = f"{self.low:.2f}", f"{self.high:.2f}"
        return "" if low == high else f"{low} to {high}"

    def __str__(self) -> str:
        return f"{self.estimate:.2f}" + (f" ({self.ends})" if self.ends else "")


@final
class Gain:
    """Estimates the gain from a run's iterations, in order; it keeps a sample of at most 512, so memory does not grow.

    With an equal share, each worker would have computed for as long as the `Elasticity` of its time predicts, and all
    would have left the iteration when the latest finished. An iteration at new sizes that takes most workers far longer
    than the previous one has compiled. Equal sizes would not have compiled, so for them the previous one counts again.

    Another process may slow a worker by a factor, or take seconds that do not depend on the batch size. Where a worker
    is far above its median pace, the excess is such seconds in half of the draws; the estimate takes half of it.

    The interval is a percentile bootstrap: each draw has elasticities drawn by their likelihood, and resampled blocks
    of consecutive iterations. The first iteration of the run, which only warms up, is in all draws.

    Attributes:
        elasticity: The relation of the workers' times to their sizes.
    """

    def __init__(self, workers: int, global_batch_size: int, *, proportional: bool = False) -> None:
        self.elasticity = Elasticity(workers, proportional=proportional)
        self._workers, self._batch = workers, global_batch_size
        self._usual: FloatArray = np.array([[np.inf] * workers, [1.0] * workers])  # Seconds and sizes.
        self._compiled_in_a_row = 0
        # For each iteration: seconds, seconds in which no worker was at work, all workers' seconds of waiting, passes,
        # and the mean size. Then, for each worker, seconds of input and script, and seconds and size of a pass.
        self._kept: FloatArray = np.empty((_COLUMNS + 3 * workers, 0))
        self._drawn: FloatArray = np.empty(0)
        self._generator, self._part, self._count = np.random.default_rng(0), 1.0, 0

    def take(self, meetings: "Meetings") -> None:
        """Add some iterations."""
        for start in range(0, len(meetings.seconds), _AT_ONCE):
            self._take(meetings.part(slice(start, start + _AT_ONCE)))

    @property
    def speed_up(self) -> Interval:
        """The time that the run would have taken with equal sizes over the time that it took."""
        return self._speed_up(self.elasticity.quantiles((np.arange(_LEVELS) + 0.5) / _LEVELS))

    @property
    def speed_up_if_known(self) -> Interval:
        """The same if the elasticities were known; the remaining interval becomes narrower in a longer run."""
        return self._speed_up(self.elasticity.medians[np.newaxis])

    def _speed_up(self, levels: FloatArray) -> Interval:
        equal = np.array([self._in_blocks(self._with_equal(each, adds)[0]) for each in levels for adds in (0.0, 1.0)])
        seconds = self._in_blocks(self._kept[0])
        times = _resampled(len(seconds))
        drawn = (times * equal[np.arange(_DRAWS) % len(equal)]).sum(axis=1) / (times @ seconds)
        return _interval(drawn, self._in_blocks(self._usual_equal[0]).sum() / seconds.sum())

    @property
    def waits(self) -> Interval:
        """The share of all workers' time spent waiting, 0 to 1."""
        seconds, waits = self._in_blocks(self._kept[0]) * self._workers, self._in_blocks(self._kept[2])
        times = _resampled(len(seconds))
        return _interval(times @ waits / (times @ seconds), waits.sum() / seconds.sum())

    @property
    def equal_waits(self) -> float:
        """The share of all workers' time that they would have spent waiting with equal sizes, 0 to 1."""
        seconds, waits = (float(self._in_blocks(each).sum()) for each in self._usual_equal)
        return waits / (seconds * self._workers)

    @property
    def paces(self) -> FloatArray:
        """Each worker's seconds for an equal share, summed over the kept iterations; shape [workers]."""
        return np.asarray(self._paces(self.elasticity.medians).sum(axis=1))

    @property
    def sampled(self) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        """The kept iterations with a whole global batch.

        Each worker's samples and compute seconds of a pass, and its seconds of input and script, of shape [workers,
        iterations]; and the seconds in which no worker was at work, of shape [iterations].
        """
        whole = self._kept[4] >= 0.999  # The last slice of an epoch is often shorter.
        others, seconds, sizes = self._kept[_COLUMNS:].reshape(3, self._workers, -1)
        samples = sizes * self._batch / self._workers
        return samples[:, whole], seconds[:, whole], others[:, whole], self._kept[1, whole]

    @property
    def _usual_equal(self) -> tuple[FloatArray, FloatArray]:
        return self._with_equal(self.elasticity.medians)

    def _paces(self, elasticities: FloatArray) -> FloatArray:
        _, seconds, sizes = self._kept[_COLUMNS:].reshape(3, self._workers, -1)
        return np.asarray(seconds / _relative(elasticities, sizes))

    def _with_equal(self, elasticities: FloatArray, adds: float = 0.5) -> tuple[FloatArray, FloatArray]:
        """The seconds of each iteration with equal sizes, and all workers' waiting in it.

        The part `adds`, 0 to 1, of what takes a worker far above its median pace does not depend on its size.
        """
        _, rest, _, passes, size = self._kept[:_COLUMNS]
        paces, sizes = self._paces(elasticities), self._kept[-self._workers :]
        median = np.median(paces, axis=1, keepdims=True)
        # Within 1.5 times the median, times vary by themselves.
        excess = adds * np.where(paces > 1.5 * median, paces - median, 0.0)
        equal = _relative(elasticities, size)
        own = (paces * equal + excess * (_relative(elasticities, sizes) - equal)) * passes
        own += self._kept[_COLUMNS : _COLUMNS + self._workers]
        longest = own.max(axis=0)
        return rest + longest, (longest - own).sum(axis=0)

    def _in_blocks(self, values: FloatArray) -> FloatArray:
        """The first value, and the sums of at most 64 blocks of the others, scaled to all iterations.

        The iterations of a block are consecutive, so that it holds whole episodes of slowness.
        """
        others = len(values) - 1
        count = min(others, 64)
        starts = np.arange(count) * others // max(count, 1)
        sums = np.add.reduceat(values[1:], starts) * ((self._count - 1) / others) if count else np.empty(0)
        return np.concatenate([values[:1], sums])

    def _take(self, meetings: "Meetings") -> None:
        passes = np.maximum(np.rint(meetings.samples.sum(axis=0) / self._batch), 1.0)
        own = meetings.own.sum(axis=0)
        sizes = meetings.measured * self._workers / (self._batch * passes)  # In equal shares of a global batch.
        both = np.array([meetings.own[0] / passes, sizes])
        both, counts = self._without_compiling(both, np.asarray((both > 0).all(axis=0)))
        for worker, kept in enumerate(counts):
            self.elasticity.observe(worker, *both[:, worker, kept])
        of_all = [meetings.seconds, meetings.seconds - own.max(axis=0), meetings.wait.sum(axis=0), passes]
        rows = np.concatenate([of_all, [sizes.mean(axis=0)], own - meetings.own[0], *both])
        drawn = self._generator.random((rows.shape[1],))
        drawn[: max(1 - self._count, 0)] = 0.0
        self._count += rows.shape[1]
        kept = drawn < self._part
        self._kept = np.concatenate([self._kept, rows[:, kept]], axis=1)
        self._drawn = np.concatenate([self._drawn, drawn[kept]])
        while len(self._drawn) > 512:
            self._part /= 2
            kept = self._drawn < self._part
            self._kept, self._drawn = self._kept[:, kept], self._drawn[kept]

    def _without_compiling(self, both: FloatArray, counts: BoolArray) -> tuple[FloatArray, BoolArray]:
        """Seconds and sizes, replaced by the previous ones where they do not count or have compiled; and who counts."""
        before = np.concatenate([self._usual[0, :, np.newaxis], both[0, :, :-1]], axis=1)
        if counts.all() and not self._compiled_in_a_row and not (both[0] > _FAR * before).any():
            self._usual = both[..., -1]
            return both, counts
        for index in range(both.shape[2]):
            (seconds, sizes), (usual_seconds, usual_sizes) = both[..., index], self._usual
            new = counts[:, index] & (sizes != usual_sizes)
            late = new & (seconds > _FAR * usual_seconds * np.maximum(sizes / usual_sizes, 1.0))
            # If more than four in a row take as long, the workers are slow.
            compiled = 2 * late.sum() > new.sum() and self._compiled_in_a_row < 4
            self._compiled_in_a_row = self._compiled_in_a_row + 1 if compiled else 0
            counts[:, index] &= ~(new & compiled)
            self._usual = np.where(counts[:, index], both[..., index], self._usual)
            both[..., index] = np.where(np.isfinite(self._usual[0]), self._usual, [[0.0], [1.0]])
        return both, counts


def _relative(elasticities: FloatArray, sizes: FloatArray) -> FloatArray:
    """The time of these sizes over the time of an equal share, shape [workers, iterations]."""
    follows = elasticities[:, np.newaxis]
    return np.asarray(1 - follows + follows * sizes)


def _resampled(count: int) -> FloatArray:
    """The number of times that each block is in each draw; once for the first, which is one iteration."""
    times = np.ones((_DRAWS, count))
    if count > 1:
        times[:, 1:] = np.random.default_rng(0).multinomial(count - 1, [1 / (count - 1)] * (count - 1), _DRAWS)
    return times


def _interval(drawn: FloatArray, estimate: float) -> Interval:
    low, high = np.percentile(drawn, (2.5, 97.5))
    return Interval(low=min(float(low), estimate), estimate=float(estimate), high=max(float(high), estimate))
