"""What all predictors of speed have in common: their interface, and the noise of their measurements."""

import math
from dataclasses import dataclass, field
from typing import Final, Protocol, final

from evenstep.core.state import HasState, Stateful
from evenstep.core.values import Factors, Prediction, Sample

_PRIOR_LEVEL: Final = 0.3
_PRIOR_WEIGHT: Final = 0.25
_MIN_WEIGHT: Final = 1.0 / 40
_FLOOR: Final = 0.01
_ALIKE: Final = 0.02
_CAP: Final = 4.0
_ROOT_TWO: Final = math.sqrt(2.0)
_FASTEST: Final = 1e-15
_SLOWEST: Final = 1e12


class Predictor(HasState, Protocol):
    """Predicts one worker's seconds per sample. One instance per worker."""

    @property
    def uses_factors(self) -> bool:
        """Whether its predictions depend on the factors, which are sampled only then."""

    def observe(self, sample: Sample) -> None:
        """Take in one measured iteration, oldest first."""

    def predict(self, factors: Factors) -> Prediction | None:
        """The next iteration, given the factors known before it; None before the first measurement."""

    def restart(self) -> None:
        """Forget the level of the speed, because samples count differently from now on; keep what else was learned."""


def seconds_per_sample(sample: Sample) -> float:
    """The measured seconds per sample, clipped to 1e-15 to 1e12, which the averages can compute with."""
    rate = sample.compute_seconds / sample.samples
    # Compared by hand: min and max would take longer than the rest, for every worker and iteration.
    return _FASTEST if rate < _FASTEST else _SLOWEST if rate > _SLOWEST else rate


@final
@dataclass(slots=True)
class Noise(Stateful):
    """The relative standard deviation of a single measurement, from neighbouring measurements of similar size.

    Differences of neighbours leave out what is not noise: a drift, a change of speed (which counts once) and a time
    model that is wrong for other sizes. Each difference counts as four standard deviations at most. The level starts at
    30 %. That start counts as a quarter of a difference, so that one lucky agreement is not taken for precision. Later,
    the level averages over about the last 40 differences.

    Attributes:
        level: The relative standard deviation, at least 1 %.
    """

    level: float = field(init=False, default=_PRIOR_LEVEL)
    _variance: float = field(init=False, default=_PRIOR_LEVEL**2)
    _count: int = field(init=False, default=0)
    _before: Sample | None = field(init=False, default=None)
    _rate_before: float = field(init=False, default=0.0)

    def observe(self, sample: Sample, rate: float) -> None:
        """Take in one measured iteration and its `seconds_per_sample`."""
        before, rate_before = self._before, self._rate_before
        self._before, self._rate_before = sample, rate
        if before is None or abs(sample.samples - before.samples) > _ALIKE * before.samples:
            return
        deviation = abs(math.log(rate / rate_before) / _ROOT_TWO)
        most = _CAP * self.level
        if deviation > most:
            deviation = most
        self._count += 1
        weight = 1.0 / (self._count + _PRIOR_WEIGHT)
        if weight < _MIN_WEIGHT:
            weight = _MIN_WEIGHT
        self._variance += weight * (deviation * deviation - self._variance)
        level = math.sqrt(self._variance)
        self.level = level if level > _FLOOR else _FLOOR
