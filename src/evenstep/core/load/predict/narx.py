"""Predicts the next iteration from past speeds and from what is known about the machine before it: LB-BSP's NARX."""

import math
from typing import Final, cast, final

from evenstep.core.load.predict.ema import Ema
from evenstep.core.load.predict.narx_inputs import WIDTH, NarxInputs
from evenstep.core.load.predict.narx_network import NarxNetwork
from evenstep.core.load.predict.noise import seconds_per_sample
from evenstep.core.load.predict.one_step_error import OneStepError
from evenstep.core.load.predict.recent import Recent
from evenstep.core.values import Factors, Prediction, Sample, State

_ALPHA: Final = 0.2
_WINDOW: Final = 100
_JUDGED_FROM: Final = 25
_USED_FROM: Final = 50
_MARGIN: Final = 0.97
_MIN_ERROR: Final = 0.01


@final
class Narx:
    """LB-BSP (arXiv 1806.02508; SoCC'20): v_k = F(v_{k-1}, ..; c_k, c_{k-1}, ..; m_k, m_{k-1}, ..) by a small network.

    A nonlinear autoregressive model with exogenous inputs: past speeds v, and past and present shares c of processors
    and m of memory that the worker can have. It learns one step ahead, on measured speeds, one step of its filter per
    iteration. The paper does not give layer sizes, lags, optimiser or schedule; ours are in `NarxNetwork` and
    `NarxInputs`. The network predicts by how much log speed will differ from an exponential moving average of weight
    0.2. The prediction stays within the range of the last 100 measurements.

    The average's own prediction stands instead until the network has learned from 50 iterations, and whenever its
    one-step error over about the last 50 iterations is not at least 3 % less than the average's, each prediction made
    before the measurement that it is held against. This guard is ours: where neither factors nor past speeds lead the
    speed, a network can only add noise.

    The relative error of a corrected prediction is the network's recent one-step error, at least one per cent, in the
    place of the noise in the average's standard error: noise that the average lets through the correction lets
    through too, and a network that misses much says so.
    """

    __slots__ = ("_average", "_average_error", "_error", "_inputs", "_network", "_recent")

    uses_factors: Final = True

    def __init__(self) -> None:
        self._average = Ema(_ALPHA)
        self._inputs = NarxInputs(_ALPHA)
        self._network = NarxNetwork(WIDTH)
        self._recent = Recent(_WINDOW)
        self._error = OneStepError()
        self._average_error = OneStepError()

    @property
    def trusted(self) -> bool:
        """Whether predictions are the network's, not the average's."""
        known = self._network.learned >= _USED_FROM and self._inputs.complete
        return known and self._error.root < _MARGIN * self._average_error.root

    def observe(self, sample: Sample) -> None:
        log = math.log(seconds_per_sample(sample))
        if self._inputs.complete:
            self._learn(log, sample.factors)
        self._average.observe(sample)
        self._inputs.observe(log, sample.factors)
        self._recent.observe(sample)

    def predict(self, factors: Factors) -> Prediction | None:
        """The network's value for these factors where it is trusted, else the average's."""
        average = self._average.predict(factors)
        if average is None or not self.trusted:
            return average
        level = math.log(average.seconds_per_sample)
        correction = self._network.predict(self._inputs.at(level, factors))
        passed_on = average.relative_error / self._average.noise
        return Prediction(
            seconds_per_sample=math.exp(self._recent.clamp(level + correction)),
            relative_error=max(self._error.root, _MIN_ERROR) * passed_on,
        )

    def restart(self) -> None:
        """Forget the speeds; the network, the errors of both, the noise level and the last factors stay."""
        self._average.restart()
        self._inputs.restart()
        self._recent.clear()

    def state_dict(self) -> State:
        return {
            "average": self._average.state_dict(),
            "inputs": self._inputs.state_dict(),
            "network": self._network.state_dict(),
            "recent": self._recent.state_dict(),
            "error": self._error.state_dict(),
            "average_error": self._average_error.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        self._average.load_state_dict(cast("State", state["average"]))
        self._inputs.load_state_dict(cast("State", state["inputs"]))
        self._network.load_state_dict(cast("State", state["network"]))
        self._recent.load_state_dict(cast("State", state["recent"]))
        self._error.load_state_dict(cast("State", state["error"]))
        self._average_error.load_state_dict(cast("State", state["average_error"]))

    def _learn(self, log: float, factors: Factors) -> None:
        average = self._average.predict(factors)
        assert average is not None
        level = math.log(average.seconds_per_sample)
        judged = self._network.learned >= _JUDGED_FROM
        correction = self._network.learn(self._inputs.at(level, factors), log - level)
        if judged:
            self._error.observe(log - self._recent.clamp(level + correction))
            self._average_error.observe(log - level)
