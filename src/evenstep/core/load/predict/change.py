"""Tells a lasting change of speed from a single odd iteration: an average that starts afresh when the speed changes."""

import math
from enum import Enum
from typing import Final, Protocol, cast, final

from evenstep.core.load.base import Predictor
from evenstep.core.load.predict.noise import seconds_per_sample
from evenstep.core.load.predict.sample_state import sample_from_state, sample_to_state
from evenstep.core.values import Factors, Prediction, Sample, State

_BAND: Final = 3.0
_WIDEST: Final = 6.0


class Averaging(Predictor, Protocol):
    """A predictor that averages, and knows its noise."""

    @property
    def noise(self) -> float:
        """The relative standard deviation of a single measurement."""

    def score(self, sample: Sample) -> float:
        """By how many standard deviations the measurement differs from the prediction, signed; 0 before any."""

    def widen(self, score: float) -> None:
        """Take the scatter of a measurement with this score into account, but not its value."""


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

    def __init__(self, average: Averaging) -> None:
        self._average = average
        self._doubtful: Sample | None = None

    @property
    def noise(self) -> float:
        """The relative standard deviation of a single measurement."""
        return self._average.noise

    def observe(self, sample: Sample) -> None:
        """Take in one measured iteration, oldest first."""
        self.judge(sample)

    def judge(self, sample: Sample) -> Verdict:
        """Take in one measured iteration, oldest first, and say what it was taken for."""
        score = self._average.score(sample)
        before, self._doubtful = self._doubtful, None
        before_score = 0.0 if before is None else self._average.score(before)
        if abs(score) > _BAND and before is not None and score * before_score > 0.0:
            return self._start_afresh(before, sample)
        if before is not None:
            # Without this an average whose worker became noisier would take every measurement for an outlier for ever.
            self._average.widen(_capped(before_score))
        if abs(score) > _BAND:
            self._doubtful = sample
            return Verdict.DOUBTFUL
        self._average.observe(sample)
        return Verdict.USUAL

    def predict(self, factors: Factors) -> Prediction | None:
        """The average since the last change."""
        return self._average.predict(factors)

    def restart(self) -> None:
        """Forget the average; the noise level stays."""
        self._average.restart()
        self._doubtful = None

    def state_dict(self) -> State:
        """Everything that `load_state_dict` needs to go on bit for bit."""
        return {
            "average": self._average.state_dict(),
            "doubtful": None if self._doubtful is None else sample_to_state(self._doubtful),
        }

    def load_state_dict(self, state: State) -> None:
        """Go on where the given state was taken."""
        self._average.load_state_dict(cast("State", state["average"]))
        doubtful = cast("State | None", state["doubtful"])
        self._doubtful = None if doubtful is None else sample_from_state(doubtful)

    def _start_afresh(self, before: Sample, sample: Sample) -> Verdict:
        difference = math.log(seconds_per_sample(sample) / seconds_per_sample(before)) / self._average.noise
        self._average.restart()
        if abs(difference) > _BAND:
            self._average.widen(_capped(difference / math.sqrt(2.0)))
            self._average.observe(sample)
            return Verdict.CHANGED_SINCE
        self._average.observe(before)
        self._average.observe(sample)
        return Verdict.CHANGED


def _capped(score: float) -> float:
    return math.copysign(min(abs(score), _WIDEST), score)
