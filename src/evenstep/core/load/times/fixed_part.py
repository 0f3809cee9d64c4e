"""Finds the part of one worker's time that does not depend on the batch size, from the iterations as they come."""

import math
from dataclasses import dataclass
from typing import Final, Self, cast, final

from evenstep.core.load.predict.change import Change, Verdict
from evenstep.core.load.predict.ema import Ema
from evenstep.core.load.predict.sample_state import sample_from_state, sample_to_state
from evenstep.core.values import Sample, State

_WINDOW: Final = 32
_LEAST_SPREAD: Final = 0.02
_LARGEST_ERROR: Final = 0.2
_SIGNIFICANT: Final = 3.0
_LEAST_ELASTICITY: Final = 1.0 / 11.0
_LEAST_STEP: Final = 0.01


@final
class FixedPart:
    """Fits c in t = s * (c + x): x samples take as long as c + x effective ones at s seconds each.

    c is the least-squares line's intercept over its slope, on the recent iterations of the present regime of speed.
    It is counted in samples so that a slowdown, which scales s, leaves it alone. c moves only where the sizes have
    spread enough against the noise and the line differs from the present c by what noise cannot explain; it starts at 0
    (a line through the origin) and is kept between 0 and ten times the batch size.

    A change of size with a wrong c looks like a change of speed. It is taken for what it is where one line explains the
    times on both sides of it, and for a change of speed otherwise.

    LB-BSP's first version profiles each device beforehand; fitting on line is ours.
    """

    __slots__ = ("_doubtful", "_regime", "_samples", "_window")

    def __init__(self) -> None:
        self._samples = 0.0
        self._window: list[Sample] = []
        self._doubtful: Sample | None = None
        self._regime = Change(Ema(alpha=1.0 / _WINDOW))

    @property
    def samples(self) -> float:
        """The fixed part c, in samples."""
        return self._samples

    @property
    def window(self) -> tuple[Sample, ...]:
        """The recent iterations of the present regime, oldest first, outliers left out."""
        return tuple(self._window)

    def effective(self, sample: Sample) -> Sample:
        """The iteration with the fixed part counted as samples."""
        return Sample(
            samples=sample.samples + self._samples, compute_seconds=sample.compute_seconds, factors=sample.factors
        )

    def observe(self, sample: Sample) -> bool:
        """Take in one measured iteration, oldest first; True where that changed c.

        Whoever predicts from effective samples then has to start afresh, from `window`.
        """
        verdict = self._regime.judge(self.effective(sample))
        doubtful, self._doubtful = self._doubtful, None
        if verdict is Verdict.DOUBTFUL:
            self._doubtful = sample
            return False
        if verdict is Verdict.USUAL:
            self._window = [*self._window, sample][-_WINDOW:]
            return self._refit()
        fresh = [doubtful, sample] if verdict is Verdict.CHANGED and doubtful is not None else [sample]
        if self._same_regime(fresh):
            return True
        self._window = fresh
        return False

    def state_dict(self) -> State:
        """Everything that `load_state_dict` needs to go on bit for bit."""
        return {
            "samples": self._samples,
            "window": [sample_to_state(sample) for sample in self._window],
            "doubtful": None if self._doubtful is None else sample_to_state(self._doubtful),
            "regime": self._regime.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        """Go on where the given state was taken."""
        self._samples = cast("float", state["samples"])
        self._window = [sample_from_state(sample) for sample in cast("list[State]", state["window"])]
        doubtful = cast("State | None", state["doubtful"])
        self._doubtful = None if doubtful is None else sample_from_state(doubtful)
        self._regime.load_state_dict(cast("State", state["regime"]))

    def _refit(self) -> bool:
        line = _Line.through(self._window, self._regime.noise)
        if line is None or line.error > _LARGEST_ERROR:
            return False
        present = line.size / (line.size + self._samples)
        step = abs(max(line.elasticity, _LEAST_ELASTICITY) - present)
        if step < max(_SIGNIFICANT * line.error, _LEAST_STEP):
            return False
        return self._adopt(line)

    def _same_regime(self, fresh: list[Sample]) -> bool:
        """Whether one line explains the window and the fresh iterations; adopts it where it does."""
        together = [*self._window, *fresh][-_WINDOW:]
        line = _Line.through(together, self._regime.noise)
        if line is None or line.error > _LARGEST_ERROR:
            return False
        if not _LEAST_ELASTICITY <= line.elasticity <= 1.0:
            return False
        fixed = line.fixed_samples
        jump = _mean_log_rate(fresh, fixed) - _mean_log_rate(self._window, fixed)
        if abs(jump) > _SIGNIFICANT * self._regime.noise:
            return False
        self._window = together
        return self._adopt(line)

    def _adopt(self, line: "_Line") -> bool:
        if line.fixed_samples == self._samples:
            return False
        self._samples = line.fixed_samples
        self._regime.restart()
        for sample in self._window:
            self._regime.observe(self.effective(sample))
        return True


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
        """Intercept over slope, in samples, within its limits."""
        elasticity = min(max(self.elasticity, _LEAST_ELASTICITY), 1.0)
        return self.size * (1.0 / elasticity - 1.0)

    @classmethod
    def through(cls, samples: list[Sample], noise: float) -> Self | None:
        """By least squares of the relative residuals, since noise is relative; None where the sizes are too alike."""
        sizes = [sample.samples for sample in samples]
        least = min(sizes)
        if max(sizes) < (1.0 + _LEAST_SPREAD) * least:
            return None
        # Scaled by the last time and the least size, so that the sums neither overflow nor vanish. The weight of a
        # time is its inverse square, and that times the time its inverse.
        unit = samples[-1].compute_seconds
        w = wd = wdd = wt = wdt = 0.0
        for sample in samples:
            inverse = unit / sample.compute_seconds
            offset = sample.samples / least - 1.0
            weight = inverse * inverse
            w += weight
            wd += weight * offset
            wdd += weight * offset * offset
            wt += inverse
            wdt += inverse * offset
        size = 1.0 + wd / w
        level = wt / w
        spread = (wdd - wd * wd / w) / size**2
        if spread <= 0.0:
            return None
        elasticity = (wdt - wd * wt / w) / (size * spread * level)
        error = noise * math.sqrt(1.0 / spread + elasticity**2 / w) / level
        return cls(size=size * least, elasticity=elasticity, error=error)


def _mean_log_rate(samples: list[Sample], fixed: float) -> float:
    return sum(math.log(s.compute_seconds / (s.samples + fixed)) for s in samples) / len(samples)
