"""Predicts that the next iteration takes the average of the past ones."""

import math
from typing import Final, cast, final

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

    uses_factors: Final = False

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
        return self._noise.level

    def observe(self, sample: Sample) -> None:
        self.note(sample)
        self.absorb(sample)

    def note(self, sample: Sample) -> None:
        self._noise.observe(sample)

    def absorb(self, sample: Sample) -> None:
        measured = seconds_per_sample(sample)
        self._count += 1
        weight = 1.0 / self._count
        if weight < self._alpha:
            weight = self._alpha
        # Adding a difference with weight 1 would miss the new value by its rounding.
        self._mean = measured if weight == 1.0 else self._mean + weight * (measured - self._mean)
        self._squared_weights = (1.0 - weight) ** 2 * self._squared_weights + weight**2

    def predict(self, factors: Factors) -> Prediction | None:
        """The average seconds per sample; the factors are not used."""
        if not self._count:
            return None
        return Prediction(self._mean, self._noise.level * math.sqrt(self._squared_weights))

    def score(self, sample: Sample) -> float:
        if not self._count:
            return 0.0
        spread = self._noise.level * math.sqrt(1.0 + self._squared_weights)
        return math.log(seconds_per_sample(sample) / self._mean) / spread

    def restart(self) -> None:
        """Forget the average; the noise level stays."""
        self._mean, self._count, self._squared_weights = 0.0, 0, 0.0

    def state_dict(self) -> State:
        return {
            "mean": self._mean,
            "count": self._count,
            "squared_weights": self._squared_weights,
            "noise": self._noise.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        self._mean = cast("float", state["mean"])
        self._count = cast("int", state["count"])
        self._squared_weights = cast("float", state["squared_weights"])
        self._noise.load_state_dict(cast("State", state["noise"]))
