"""Predicts that the next iteration takes the mean of the last few."""

import math
from collections import deque
from typing import Final, cast, final

from evenstep.core.errors import ConfigError
from evenstep.core.load.predict.noise import Noise, seconds_per_sample
from evenstep.core.values import Factors, Prediction, Sample, State


@final
class Mean:
    """The plain mean of the last `window` measured seconds per sample; fewer as long as there are fewer.

    Its relative error is noise / sqrt(n), n the number of measurements in it.
    """

    __slots__ = ("_noise", "_rates")

    uses_factors: Final = False

    def __init__(self, window: int = 10) -> None:
        if window < 1:
            raise ConfigError(f"a mean cannot be taken over {window} iterations: use a window of at least 1")
        self._rates: deque[float] = deque(maxlen=window)
        self._noise = Noise()

    def observe(self, sample: Sample) -> None:
        self._noise.observe(sample)
        self._rates.append(seconds_per_sample(sample))

    def predict(self, factors: Factors) -> Prediction | None:
        """The mean seconds per sample; the factors are not used."""
        count = len(self._rates)
        if not count:
            return None
        return Prediction(
            seconds_per_sample=math.fsum(self._rates) / count, relative_error=self._noise.level / math.sqrt(count)
        )

    def restart(self) -> None:
        """Forget the window; the noise level stays."""
        self._rates.clear()

    def state_dict(self) -> State:
        return {"rates": list(self._rates), "noise": self._noise.state_dict()}

    def load_state_dict(self, state: State) -> None:
        self._rates.clear()
        self._rates.extend(cast("list[float]", state["rates"]))
        self._noise.load_state_dict(cast("State", state["noise"]))
