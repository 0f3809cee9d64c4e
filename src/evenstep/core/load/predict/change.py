"""Tells a lasting change of speed from a single odd iteration: an average that starts afresh when the speed changes."""

import math
from enum import Enum
from typing import Final, Protocol, cast, final

from evenstep.core.load.predict.base import Predictor
from evenstep.core.load.predict.noise import seconds_per_sample
from evenstep.core.load.predict.sample_state import sample_from_state, sample_to_state
from evenstep.core.values import Factors, Prediction, Sample, State

_BAND: Final = 3.0


class Averaging(Predictor, Protocol):
    """A predictor that averages, and whose noise and value can be fed apart: `observe` is `note` and `absorb`."""

    @property
    def noise(self) -> float:
        """The relative standard deviation of a single measurement."""

    def score(self, sample: Sample) -> float:
        """By how many standard deviations the measurement differs from the prediction, signed; 0 before any."""

    def note(self, sample: Sample) -> None:
        """Learn the noise from the measurement, but not its value."""

    def absorb(self, sample: Sample) -> None:
        """Take the measurement's value into the average."""


class Verdict(Enum):
    """What one measurement turned out to be."""

    USUAL = "within the noise"
    DOUBTFUL = "an outlier, or the first of a change"
    CHANGED = "the second of a change, which the doubtful one before it belongs to"
    CHANGED_SINCE = "the second of a change, which came in the middle of the doubtful one before it"


@final
class Change:
    """Wraps an average: one measurement outside the noise is ignored, two in a row on the same side start it afresh.

    With those two the average starts again, or with the later one alone where they differ by more than the noise:
    the change then came in the middle of the earlier one. LB-BSP only says to tell deterministic from
    non-deterministic stragglers by a window; this way of doing so is ours. It follows a step in two iterations where an
    average needs its whole memory, and a single odd iteration moves it not at all.
    """

    __slots__ = ("_average", "_doubtful")

    uses_factors: Final = False

    def __init__(self, average: Averaging) -> None:
        self._average = average
        self._doubtful: Sample | None = None

    @property
    def noise(self) -> float:
        return self._average.noise

    def observe(self, sample: Sample) -> None:
        self.judge(sample)

    def judge(self, sample: Sample) -> Verdict:
        """Take in one measured iteration, oldest first, and say what it was taken for."""
        score = self._average.score(sample)
        before, self._doubtful = self._doubtful, None
        same_side = before is not None and score * self._average.score(before) > 0.0
        outside = abs(score) > _BAND
        # Noise is learned from outliers too, or a worker that becomes noisier would be all outliers for ever.
        self._average.note(sample)
        if not outside:
            self._average.absorb(sample)
            return Verdict.USUAL
        if before is None or not same_side:
            self._doubtful = sample
            return Verdict.DOUBTFUL
        self._average.restart()
        difference = math.log(seconds_per_sample(sample) / seconds_per_sample(before))
        if abs(difference) > _BAND * self._average.noise:
            self._average.absorb(sample)
            return Verdict.CHANGED_SINCE
        self._average.absorb(before)
        self._average.absorb(sample)
        return Verdict.CHANGED

    def predict(self, factors: Factors) -> Prediction | None:
        """The average since the last change."""
        return self._average.predict(factors)

    def restart(self) -> None:
        """Forget the average; the noise level stays."""
        self._average.restart()
        self._doubtful = None

    def state_dict(self) -> State:
        return {
            "average": self._average.state_dict(),
            "doubtful": None if self._doubtful is None else sample_to_state(self._doubtful),
        }

    def load_state_dict(self, state: State) -> None:
        self._average.load_state_dict(cast("State", state["average"]))
        doubtful = cast("State | None", state["doubtful"])
        self._doubtful = None if doubtful is None else sample_from_state(doubtful)
