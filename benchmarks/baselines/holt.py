"""Predicts that the speed goes on changing as it lately did: a level and a trend."""

import math
from typing import Final, cast, final

from evenstep.core.load.predict.base import Noise, seconds_per_sample
from evenstep.core.load.predict.narx import Recent

from evenstep.core.errors import ConfigError
from evenstep.core.values import Factors, Prediction, Sample, State

_WINDOW: Final = 10
_SLACK: Final = 0.1


@final
class Holt:
    """Holt's double exponential smoothing (Holt 1957) of the logarithm of seconds per sample, with a damped trend.

    With y the newest logarithm, p = level + damping * trend the prediction of it, and e = y - p:

        level = p + alpha * e,   trend = damping * trend + alpha * beta * e

    On logarithms a steady drift is a steady percentage per iteration and the prediction is positive. The trend cannot
    run away: it is damped (Gardner and McKenzie 1985), and the prediction stays within 10 % of the range of the last
    ten measurements. The first weights of the level are 1/n, as in a plain mean.

    The relative error is noise * sqrt(sum of squares of the weights that the measurements have in the prediction), as
    for an average; it does not count what a trend that ends would be wrong by.
    """

    __slots__ = (
        "_alpha",
        "_beta",
        "_count",
        "_cross",
        "_damping",
        "_level",
        "_level_squares",
        "_noise",
        "_recent",
        "_trend",
        "_trend_squares",
    )

    def __init__(self, alpha: float = 0.3, beta: float = 0.15, damping: float = 0.95) -> None:
        for name, value in (("alpha", alpha), ("beta", beta), ("damping", damping)):
            if not 0.0 < value <= 1.0:
                raise ConfigError(f"smoothing with {name}={value} is not possible: use 0 < {name} <= 1")
        self._alpha = alpha
        self._beta = beta
        self._damping = damping
        self._noise = Noise()
        self._recent = Recent(_WINDOW)
        self._count = 0
        self._level, self._trend = 0.0, 0.0
        self._level_squares, self._cross, self._trend_squares = 0.0, 0.0, 0.0

    def observe(self, sample: Sample) -> None:
        self._noise.observe(sample, seconds_per_sample(sample))
        self._recent.observe(sample)
        measured = math.log(seconds_per_sample(sample))
        self._count += 1
        gain = max(1.0 / self._count, self._alpha)
        trend_gain = 0.0 if self._count == 1 else self._alpha * self._beta
        damping = self._damping
        damped = damping * self._trend
        error = measured - (self._level + damped)
        self._level += damped + gain * error
        self._trend = damped + trend_gain * error
        # The covariance of level and trend under unit noise, carried through the same two equations.
        level, cross, trend = self._level_squares, self._cross, self._trend_squares
        of_prediction = level + 2.0 * damping * cross + damping**2 * trend
        with_trend = damping * cross + damping**2 * trend
        keep = 1.0 - gain
        self._level_squares = keep**2 * of_prediction + gain**2
        self._cross = keep * (with_trend - trend_gain * of_prediction) + gain * trend_gain
        self._trend_squares = (
            damping**2 * trend - 2.0 * trend_gain * with_trend + trend_gain**2 * of_prediction + trend_gain**2
        )

    def predict(self, factors: Factors) -> Prediction | None:
        """Level and damped trend, one iteration on; the factors are not used."""
        if not self._count:
            return None
        damping = self._damping
        squares = self._level_squares + 2.0 * damping * self._cross + damping**2 * self._trend_squares
        return Prediction(
            seconds_per_sample=math.exp(self._recent.clamp(self._level + damping * self._trend, slack=_SLACK)),
            relative_error=self._noise.level * math.sqrt(max(squares, 0.0)),
        )

    def restart(self) -> None:
        """Forget level and trend; the noise level stays."""
        self._recent.clear()
        self._count = 0
        self._level, self._trend = 0.0, 0.0
        self._level_squares, self._cross, self._trend_squares = 0.0, 0.0, 0.0

    def state_dict(self) -> State:
        return {
            "count": self._count,
            "level": self._level,
            "trend": self._trend,
            "squares": [self._level_squares, self._cross, self._trend_squares],
            "recent": self._recent.state_dict(),
            "noise": self._noise.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        self._count = cast("int", state["count"])
        self._level = cast("float", state["level"])
        self._trend = cast("float", state["trend"])
        self._level_squares, self._cross, self._trend_squares = cast("list[float]", state["squares"])
        self._recent.load_state_dict(cast("State", state["recent"]))
        self._noise.load_state_dict(cast("State", state["noise"]))
