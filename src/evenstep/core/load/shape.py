"""Finds how one worker's time depends on its batch size, apart from its speed, from the iterations as they come."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import mul
from typing import Final, Self, final

from evenstep.core.load.predict.averages import Ema
from evenstep.core.load.predict.change import Change, Verdict
from evenstep.core.state import Stateful
from evenstep.core.values import Sample

_WINDOW: Final = 32
_LARGEST_ERROR: Final = 0.1
_SIGNIFICANT: Final = 4.0
_EXPLAINED: Final = 3.0
_MIN_STEP: Final = 0.01
_MIN_FLAT_STEP: Final = 1.5
_MIN_SPREAD: Final = 0.02
_MIN_ELASTICITY: Final = 1.0 / 11.0
_SURELY: Final = 1.0 + 1e-9


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """A line through times over sizes: at the mean `size`, one per cent more size is `elasticity` per cent more time.

    An elasticity of 1 is a line through the origin, 0 a time that does not depend on the size; `error` is its standard
    error.
    """

    size: float
    elasticity: float
    error: float

    @property
    def fixed_samples(self) -> float:
        """Intercept over slope, in samples: at least 0, and at most ten times the mean size."""
        elasticity = min(max(self.elasticity, _MIN_ELASTICITY), 1.0)
        return self.size * (1.0 / elasticity - 1.0)

    @classmethod
    def through(
        cls, samples: Sequence[Sample], noise: float, *, flat: float = 0.0, largest_error: float = _LARGEST_ERROR
    ) -> Self | None:
        """By least squares of the relative residuals, since noise is relative; None if the sizes are too similar.

        `noise` is the relative standard deviation of a time; sizes below `flat` count as `flat`. A line with a larger
        error is none.
        """
        sizes = [sample.samples for sample in samples]
        least = min(sizes)
        if least < flat:
            sizes = [size if size > flat else flat for size in sizes]
            least = flat
        if _too_similar(least, max(sizes), len(sizes), noise, largest_error):
            return None
        # Scaled by the last time and the least size, so that the sums neither overflow nor vanish. The weight of a
        # time is its inverse square, so that its product with the time is the inverse.
        unit = samples[-1].compute_seconds
        inverses = [unit / sample.compute_seconds for sample in samples]
        weights = list(map(mul, inverses, inverses))
        offsets = [size / least - 1.0 for size in sizes]
        weighted = list(map(mul, weights, offsets))
        w, wd, wdd = sum(weights), sum(weighted), sum(map(mul, weighted, offsets))
        wt, wdt = sum(inverses), sum(map(mul, inverses, offsets))
        mean = 1.0 + wd / w
        level = wt / w
        spread = (wdd - wd * wd / w) / mean**2
        if spread <= 0.0:
            return None
        elasticity = (wdt - wd * wt / w) / (mean * spread * level)
        error = noise * math.sqrt(1.0 / spread + elasticity**2 / w) / level
        return cls(size=mean * least, elasticity=elasticity, error=error) if error <= largest_error else None


@final
@dataclass(slots=True)
class Shape(Stateful):
    """Fits c and f in t = s * (c + max(x, f)): x samples take s seconds for each of c + max(x, f) effective samples.

    c, the fixed part, is the intercept of a least-squares line over its slope, on the recent iterations since the last
    change of speed. It is counted in samples, so that a slowdown, which scales s, does not change it. c starts at 0 (a
    line through the origin) and stays between 0 and ten times the batch size. It moves only if the sizes have spread
    enough against the noise to know the elasticity to a tenth, and the line differs from the present c by four standard
    errors. So c is 0 where it is not known.

    A change of size with a wrong shape looks like a change of speed. If one line explains the times on both sides, the
    shape was wrong and is corrected; otherwise the speed has changed.

    f, the flat start, is the largest size at which the device is known not to be full; 0 if none is known. It is
    learned only from a change of size by half or more that no line explains and whose two sides take equally long, with
    small errors. So neither a tile's edge nor a drop in a measured curve is taken for a flat start, and sizes that
    follow a drift of speed change too little at once. A change of speed that offsets such a change of size in the same
    iteration is taken for a flat start, though. f is forgotten if smaller sizes turn out to take less time, or if no
    shape explains the next change of size from or to one of them.

    LB-BSP's first version profiles each device beforehand; fitting online is ours.

    Attributes:
        fixed_samples: c.
        flat_samples: f.
        window: The recent iterations since the last change of speed, oldest first, without outliers.
    """

    fixed_samples: float = field(init=False, default=0.0)
    flat_samples: float = field(init=False, default=0.0)
    window: list[Sample] = field(init=False, default_factory=list)
    _least: float = field(init=False, default=0.0)
    _most: float = field(init=False, default=0.0)
    _doubtful: Sample | None = field(init=False, default=None)
    _regime: Change = field(init=False, default_factory=lambda: Change(Ema(alpha=1.0 / _WINDOW)))

    def effective(self, sample: Sample) -> Sample:
        """The iteration with its effective samples."""
        samples, seconds, factors = sample
        return Sample(
            self.fixed_samples + (samples if samples > self.flat_samples else self.flat_samples), seconds, factors
        )

    def observe(self, sample: Sample, effective: Sample) -> bool:
        """Take in one measured iteration, and what `effective` says of it, oldest first; True if the shape changed.

        A predictor of effective samples must then restart from `window`.
        """
        verdict = self._regime.judge(effective)
        doubtful, self._doubtful = self._doubtful, None
        if verdict is Verdict.DOUBTFUL:
            self._doubtful = sample
            return False
        if verdict is Verdict.USUAL:
            self.window.append(sample)
            del self.window[:-_WINDOW]
            return self._tells(sample.samples) and self._refit()
        fresh = [doubtful, sample] if verdict is Verdict.CHANGED and doubtful is not None else [sample]
        before, self.window = self.window, fresh
        self._least = 0.0
        return self._explain(before, fresh)

    def _tells(self, newest: float) -> bool:
        """Whether the window may have something new to tell: with a flat start, or sizes that differ enough for a line.

        Its sizes lie between `_least` and `_most`, which are looked up again only where there was no line.
        """
        if newest < self._least:
            self._least = newest
        elif newest > self._most:
            self._most = newest
        return self.flat_samples > 0.0 or not _too_similar(
            self._least, self._most, len(self.window), self._regime.noise, _LARGEST_ERROR
        )

    def _refit(self) -> bool:
        """Adopt another c or f if the window shows one."""
        if self.flat_samples and self._slopes_below():
            return self._adopt(self.fixed_samples, 0.0)
        line = _Line.through(self.window, self._regime.noise, flat=self.flat_samples)
        if line is None:
            sizes = [sample.samples for sample in self.window]
            self._least, self._most = min(sizes), max(sizes)
            return False
        # A line beyond the limits of c only says that c is large, or small.
        present = max(line.size / (line.size + self.fixed_samples), _MIN_ELASTICITY)
        step = abs(max(line.elasticity, _MIN_ELASTICITY) - present)
        if step < max(_SIGNIFICANT * line.error, _MIN_STEP):
            return False
        return self._adopt(line.fixed_samples, self.flat_samples)

    def _explain(self, before: list[Sample], fresh: list[Sample]) -> bool:
        """Adopt the shape, if any, under which the iterations before and after a change have the same speed."""
        together = [*before, *fresh][-_WINDOW:]
        noise = self._regime.noise
        for flat in (self.flat_samples, 0.0) if self.flat_samples else (0.0,):
            line = _Line.through(together, noise, flat=flat)
            if line is None or not _MIN_ELASTICITY <= line.elasticity <= 1.0:
                continue
            if _jump(before, fresh, line.fixed_samples, flat) <= _EXPLAINED * noise:
                self.window = together
                return self._adopt(line.fixed_samples, flat)
        before = _last_run(before)
        if self._level(before, fresh):
            self.window = [*before, *fresh]
            return self._adopt(self.fixed_samples, max(before[-1].samples, fresh[0].samples))
        if not _alike(before[-1], fresh[0]) and min(before[-1].samples, fresh[0].samples) < self.flat_samples:
            return self._adopt(self.fixed_samples, 0.0)
        return False

    def _level(self, before: list[Sample], fresh: list[Sample]) -> bool:
        """Whether two very different sizes, one of them beyond the flat start, take equally long."""
        sizes = before[-1].samples, fresh[0].samples
        if max(sizes) <= self.flat_samples or max(sizes) < _MIN_FLAT_STEP * min(sizes):
            return False
        noise = self._regime.noise
        line = _Line.through([*before, *fresh], noise)
        if line is None or abs(line.elasticity) >= _MIN_ELASTICITY:
            return False
        return _jump(before, fresh, 0.0, max(sizes)) <= _EXPLAINED * noise

    def _slopes_below(self) -> bool:
        """Whether sizes within the flat start turn out to differ in time."""
        below = [sample for sample in self.window if sample.samples <= self.flat_samples]
        line = _Line.through(below, self._regime.noise, largest_error=math.inf) if below else None
        return line is not None and line.elasticity > max(_SIGNIFICANT * line.error, _MIN_ELASTICITY)

    def _adopt(self, fixed: float, flat: float) -> bool:
        if fixed == self.fixed_samples and flat == self.flat_samples:
            return False
        self.fixed_samples, self.flat_samples = fixed, flat
        self._regime.restart()
        for sample in self.window:
            self._regime.observe(self.effective(sample))
        return True


def _too_similar(least: float, most: float, count: int, noise: float, largest_error: float) -> bool:
    """Whether no line through `count` times of sizes in this range has so small an error."""
    # The error is least with half of the sizes at either end and all times equally long.
    bound = largest_error * (most - least) * math.sqrt(count)
    return most < (1.0 + _MIN_SPREAD) * least or 2.0 * noise * least > _SURELY * bound


def _alike(one: Sample, other: Sample) -> bool:
    return abs(one.samples - other.samples) <= _MIN_SPREAD * other.samples


def _last_run(samples: list[Sample]) -> list[Sample]:
    """The last iterations that had the same size."""
    first = len(samples) - 1
    while first and _alike(samples[first - 1], samples[-1]):
        first -= 1
    return samples[first:]


def _jump(before: Sequence[Sample], fresh: Sequence[Sample], fixed: float, flat: float) -> float:
    """The difference in speed under this shape, as a difference of logarithms."""

    def rate(samples: Sequence[Sample]) -> float:
        return sum(math.log(s.compute_seconds / (fixed + max(s.samples, flat))) for s in samples) / len(samples)

    return abs(rate(fresh) - rate(before))
