"""Predicts the next iteration by a small recurrent network that learns as it goes."""

import math
from typing import Final, cast, final

from evenstep.core.load.predict.averages import Ema
from evenstep.core.load.predict.base import seconds_per_sample
from evenstep.core.load.predict.narx import OneStepError, Recent

from baselines.elman import Elman
from evenstep.core.values import Factors, Prediction, Sample, State

_MIN_DATA: Final = 50
_WINDOW: Final = 50
_MEMORY: Final = 200
_MIN_SCALE: Final = 1e-3
_MIN_ERROR: Final = 0.01


@final
class Recurrent:
    """An Elman network that predicts by how much log speed will differ from an exponential moving average of it.

    It sees one number per iteration: by how much the last measurement differed from the average before it, over the
    root mean square of about the last 200 such differences. The prediction stays within the range of the last 50
    measurements; the average's own prediction stands until 50 differences are known. LB-BSP compares with a simple
    recurrent network; the paper does not say how large or how trained, all choices are ours.

    The relative error is that of the average with the network's recent one-step error, at least one per cent, in the
    place of the noise.
    """

    __slots__ = ("_average", "_count", "_error", "_network", "_recent", "_square")

    def __init__(self) -> None:
        self._average = Ema()
        self._network = Elman()
        self._recent = Recent(_WINDOW)
        self._error = OneStepError()
        self._square = 0.0
        self._count = 0

    def observe(self, sample: Sample) -> None:
        average = self._average.predict(sample.factors)
        if average is not None:
            log = math.log(seconds_per_sample(sample))
            level = math.log(average.seconds_per_sample)
            self._error.observe(log - self._corrected(level))
            difference = log - level
            self._count += 1
            self._square += max(1.0 / self._count, 1.0 / _MEMORY) * (difference * difference - self._square)
            self._network.observe(difference / self._scale)
        self._average.observe(sample)
        self._recent.observe(sample)

    def predict(self, factors: Factors) -> Prediction | None:
        """The average, corrected; the factors are not used."""
        average = self._average.predict(factors)
        if average is None or self._count < _MIN_DATA:
            return average
        passed_on = average.relative_error / self._average.noise
        return Prediction(
            seconds_per_sample=math.exp(self._corrected(math.log(average.seconds_per_sample))),
            relative_error=max(self._error.root, _MIN_ERROR) * passed_on,
        )

    def restart(self) -> None:
        """Forget the average and the series; the weights, the scale, the errors and the noise level stay."""
        self._average.restart()
        self._network.rewind()
        self._recent.clear()

    def state_dict(self) -> State:
        return {
            "average": self._average.state_dict(),
            "network": self._network.state_dict(),
            "recent": self._recent.state_dict(),
            "error": self._error.state_dict(),
            "square": self._square,
            "count": self._count,
        }

    def load_state_dict(self, state: State) -> None:
        self._average.load_state_dict(cast("State", state["average"]))
        self._network.load_state_dict(cast("State", state["network"]))
        self._recent.load_state_dict(cast("State", state["recent"]))
        self._error.load_state_dict(cast("State", state["error"]))
        self._square = cast("float", state["square"])
        self._count = cast("int", state["count"])

    @property
    def _scale(self) -> float:
        return max(math.sqrt(self._square), _MIN_SCALE)

    def _corrected(self, level: float) -> float:
        return self._recent.clamp(level + self._network.prediction * self._scale)
