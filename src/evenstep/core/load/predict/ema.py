"""Predicts that the next iteration takes the average of the past ones."""

import math
from typing import cast, final

from evenstep.core.errors import ConfigError
from evenstep.core.load.predict.noise import Noise, seconds_per_sample
from evenstep.core.values import Factors, Prediction, Sample, State


@final
class Ema:
    """An exponential moving average of seconds per sample that starts as a plain mean: weights max(1/n, alpha).

    The plain mean keeps the first measurement from counting for 1/alpha iterations, as it does in the usual form. The
    relative error is noise / sqrt(effective n): n at first, (2 - alpha) / alpha in the end.
    """

    __slots__ = ("_alpha", "_count", "_mean", "_noise", "_squared_weights")

    def __init__(self, alpha: float = 0.2) -> None:
        if not 0.0 < alpha <= 1.0:
            raise ConfigError(f"an average cannot give its newest value a weight of {alpha}: use 0 < alpha <= 1")
        self._alpha = alpha
        self._noise = Noise()
        self._mean = 0.0
        self._count = 0
        self._squared_weights = 0.0

    @property
    def noise(self) -> float:
        """The relative standard deviation of a single measurement."""
        return self._noise.level

    def observe(self, sample: Sample) -> None:
        """Take in one measured iteration, oldest first."""
        measured = seconds_per_sample(sample)
        if self._count:
            self._noise.observe(self.score(sample) * self._noise.level)
        self._count += 1
        weight = max(1.0 / self._count, self._alpha)
        # In this form a weight of 1 gives exactly the new value, and a constant input stays exactly constant.
        self._mean = measured if weight == 1.0 else self._mean + weight * (measured - self._mean)
        self._squared_weights = (1.0 - weight) ** 2 * self._squared_weights + weight**2

    def predict(self, factors: Factors) -> Prediction | None:
        """The average seconds per sample; the factors are not used."""
        if not self._count:
            return None
        return Prediction(
            seconds_per_sample=self._mean, relative_error=self._noise.level * math.sqrt(self._squared_weights)
        )

    def score(self, sample: Sample) -> float:
        """By how many standard deviations the measurement differs from the prediction, signed; 0 before any."""
        if not self._count:
            return 0.0
        spread = self._noise.level * math.sqrt(1.0 + self._squared_weights)
        return math.log(seconds_per_sample(sample) / self._mean) / spread

    def widen(self, score: float) -> None:
        """Take the scatter of a measurement with this score into account, but not its value."""
        self._noise.observe(score * self._noise.level)

    def restart(self) -> None:
        """Forget the average; the noise level stays."""
        self._mean, self._count, self._squared_weights = 0.0, 0, 0.0

    def state_dict(self) -> State:
        """Everything that `load_state_dict` needs to go on bit for bit."""
        return {
            "mean": self._mean,
            "count": self._count,
            "squared_weights": self._squared_weights,
            "noise": self._noise.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        """Go on where the given state was taken."""
        self._mean = cast("float", state["mean"])
        self._count = cast("int", state["count"])
        self._squared_weights = cast("float", state["squared_weights"])
        self._noise.load_state_dict(cast("State", state["noise"]))
