"""Predictors that average past iterations: the last few, or all with falling weights."""

import math
from collections import deque
from dataclasses import dataclass, field
from typing import ClassVar, final

from evenstep.core.errors import ConfigError
from evenstep.core.load.predict.base import Noise, seconds_per_sample
from evenstep.core.state import Stateful
from evenstep.core.values import Factors, Prediction, Sample


@final
@dataclass(slots=True)
class Mean(Stateful):
    """Predicts the plain mean of the last `window` measurements, or of as many as there are.

    Its relative error is noise / sqrt(n), where n is the number of measurements in the mean.
    """

    uses_factors: ClassVar[bool] = False

    window: int = 10
    _rates: deque[float] = field(init=False)
    _noise: Noise = field(init=False, default_factory=Noise)

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ConfigError(f"a mean cannot be taken over {self.window} iterations: use a window of at least 1")
        self._rates = deque(maxlen=self.window)

    def observe(self, sample: Sample) -> None:
        rate = seconds_per_sample(sample)
        self._noise.observe(sample, rate)
        self._rates.append(rate)

    def predict(self, factors: Factors) -> Prediction | None:
        count = len(self._rates)
        if not count:
            return None
        return Prediction(math.fsum(self._rates) / count, self._noise.level / math.sqrt(count))

    def restart(self) -> None:
        """Forget the window; keep the noise level."""
        self._rates.clear()


@final
@dataclass(slots=True)
class Ema(Stateful):
    """Predicts an exponential moving average of the seconds per sample, with weights max(1/n, alpha).

    The average starts as a plain mean. In the usual form, the first measurement would count for 1/alpha iterations. The
    relative error is noise / sqrt(effective n): n at first, (2 - alpha) / alpha in the end. With alpha 1,
    the average is the last measurement, and its error the noise: the memoryless baseline of LB-BSP's comparison.

    Raises:
        ConfigError: `alpha` is not in (0, 1].
    """

    uses_factors: ClassVar[bool] = False

    alpha: float = 0.2
    _mean: float = field(init=False, default=0.0)
    _count: int = field(init=False, default=0)
    _squared_weights: float = field(init=False, default=0.0)
    _noise: Noise = field(init=False, default_factory=Noise)

    def __post_init__(self) -> None:
        if not 0.0 < self.alpha <= 1.0:
            raise ConfigError(f"an average cannot give its newest value a weight of {self.alpha}: use 0 < alpha <= 1")

    @property
    def noise(self) -> float:
        """The relative standard deviation of a single measurement."""
        return self._noise.level

    def observe(self, sample: Sample) -> None:
        rate = seconds_per_sample(sample)
        self.note(sample, rate)
        self.absorb(rate)

    # These take the measured seconds per sample, which one iteration needs several times.

    def note(self, sample: Sample, measured: float) -> None:
        """Learn the noise from the measurement, but not its value."""
        self._noise.observe(sample, measured)

    def absorb(self, measured: float) -> None:
        """Take the measurement's value into the average."""
        self._count = count = self._count + 1
        weight = 1.0 / count
        if weight < self.alpha:
            weight = self.alpha
        # With weight 1, adding the difference would miss the new value by its rounding.
        mean, rest = self._mean, 1.0 - weight
        self._mean = measured if weight == 1.0 else mean + weight * (measured - mean)
        self._squared_weights = rest * rest * self._squared_weights + weight * weight

    def predict(self, factors: Factors) -> Prediction | None:
        if not self._count:
            return None
        return Prediction(self._mean, self._noise.level * math.sqrt(self._squared_weights))

    def score(self, measured: float) -> float:
        """The measurement's difference from the average in standard deviations, signed; 0 before the first one."""
        if not self._count:
            return 0.0
        spread = self._noise.level * math.sqrt(1.0 + self._squared_weights)
        return math.log(measured / self._mean) / spread

    def restart(self) -> None:
        """Forget the average; keep the noise level."""
        self._mean, self._count, self._squared_weights = 0.0, 0, 0.0
