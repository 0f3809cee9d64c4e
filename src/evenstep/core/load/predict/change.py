"""Distinguishes a lasting change of speed from a single odd iteration."""

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar, Final, final

from evenstep.core.load.predict.averages import Ema
from evenstep.core.load.predict.base import seconds_per_sample
from evenstep.core.state import Stateful
from evenstep.core.values import Factors, Prediction, Sample

_BAND: Final = 3.0


class Verdict(Enum):
    """What a measurement turned out to be."""

    USUAL = "within the noise"
    DOUBTFUL = "an outlier, or the first of a change"
    CHANGED = "the second of a change, to which the doubtful one before it belongs"
    CHANGED_SINCE = "the second of a change that came in the middle of the doubtful one before it"


@final
@dataclass(slots=True)
class Change(Stateful):
    """Predicts an average that ignores one measurement outside the noise, and restarts after two on the same side.

    The average restarts from those two measurements. It restarts from the later one alone if they differ by more than
    the noise: the change then came in the middle of the earlier one. LB-BSP only says to tell deterministic from
    non-deterministic stragglers by a window; this method is ours. It follows a step in two iterations, where an average
    needs its whole memory, and a single odd iteration does not move it.
    """

    uses_factors: ClassVar[bool] = False

    average: Ema
    _doubtful: Sample | None = field(init=False, default=None)

    @property
    def noise(self) -> float:
        """The relative standard deviation of a single measurement."""
        return self.average.noise

    def observe(self, sample: Sample) -> None:
        self.judge(sample)

    def judge(self, sample: Sample) -> Verdict:
        """Take in one measured iteration, oldest first, and say what it was taken for."""
        average, rate = self.average, seconds_per_sample(sample)
        score = average.score(rate)
        before, self._doubtful = self._doubtful, None
        # Noise is learned from outliers too; else a worker that becomes noisier would only have outliers.
        average.note(sample, rate)
        if -_BAND <= score <= _BAND:
            average.absorb(rate)
            return Verdict.USUAL
        rate_before = 0.0 if before is None else seconds_per_sample(before)
        if before is None or score * average.score(rate_before) <= 0.0:
            self._doubtful = sample
            return Verdict.DOUBTFUL
        average.restart()
        if abs(math.log(rate / rate_before)) > _BAND * average.noise:
            average.absorb(rate)
            return Verdict.CHANGED_SINCE
        average.absorb(rate_before)
        average.absorb(rate)
        return Verdict.CHANGED

    def predict(self, factors: Factors) -> Prediction | None:
        return self.average.predict(factors)

    def restart(self) -> None:
        """Forget the average; keep the noise level."""
        self.average.restart()
        self._doubtful = None
