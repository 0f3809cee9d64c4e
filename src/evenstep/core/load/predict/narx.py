"""Predicts the next iteration from past speeds and from the machine's state before it: LB-BSP's NARX."""

import math
from collections import deque
from dataclasses import dataclass, field
from typing import ClassVar, Final, final

from evenstep.core.load.predict.averages import Ema
from evenstep.core.load.predict.base import seconds_per_sample
from evenstep.core.load.predict.narx_network import NarxNetwork
from evenstep.core.state import Stateful
from evenstep.core.values import Factors, Prediction, Sample

_ALPHA: Final = 0.2
_SLOW: Final = 0.03
_LAGS: Final = 3
_FACTORS: Final = 2
_MIN_FACTOR: Final = 0.02
_WINDOW: Final = 100
_JUDGED_FROM: Final = 25
_USED_FROM: Final = 50
_MARGIN: Final = 0.97
_MIN_ERROR: Final = 0.01
_ERROR_MEMORY: Final = 50

WIDTH: Final = _LAGS + 1 + 4 * _FACTORS
"""How many inputs the network has."""


@final
@dataclass(slots=True)
class OneStepError(Stateful):
    """The mean square of log(measured / predicted), predicted before the measurement, over about the last 50."""

    _count: int = field(init=False, default=0)
    _mean_square: float = field(init=False, default=0.0)

    @property
    def root(self) -> float:
        """The root of the mean square; 0 before any comparison."""
        return math.sqrt(self._mean_square)

    def observe(self, difference: float) -> None:
        """Take in the logarithm of measured over predicted."""
        self._count += 1
        weight = max(1.0 / self._count, 1.0 / _ERROR_MEMORY)
        self._mean_square += weight * (difference * difference - self._mean_square)


@final
@dataclass(slots=True)
class Recent(Stateful):
    """The logarithms of the last `length` measured seconds per sample, oldest first.

    They are logarithms because speeds scatter and change by factors; a log speed is their negative.
    """

    length: int
    logs: deque[float] = field(init=False)

    def __post_init__(self) -> None:
        self.logs = deque(maxlen=self.length)

    def observe(self, sample: Sample) -> None:
        self.logs.append(math.log(seconds_per_sample(sample)))

    def clamp(self, log: float, *, slack: float = 0.0) -> float:
        """The number, clipped to the range of the measurements, which is wider by `slack` on each side."""
        return min(max(log, min(self.logs) - slack), max(self.logs) + slack)

    def clear(self) -> None:
        self.logs.clear()


@final
@dataclass(slots=True)
class NarxInputs(Stateful):
    """The network's inputs at iteration k; those of the speed are ratios, so that its unit does not matter.

    Of the speed v: v_{k-1}, v_{k-2} and v_{k-3} over the average that the network corrects, and that average over a
    slower one. Of each factor c: c_k and c_{k-1} over its average with the same weights as the speed's, that average
    over a slower one, and c_k itself. The averages stand for all older lags. All inputs are logarithms, so that a speed
    in proportion to a factor is a straight line. A factor counts as 0.02 more than it is, so that the logarithm of 0
    exists. The paper does not say which lags it takes.
    """

    _count: int = field(init=False, default=0)
    _logs: deque[float] = field(init=False, default_factory=lambda: deque(maxlen=_LAGS))
    _before: list[float] = field(init=False, default_factory=lambda: [0.0] * _FACTORS)
    _fast: list[float] = field(init=False, default_factory=lambda: [0.0] * _FACTORS)
    _slow: list[float] = field(init=False, default_factory=lambda: [0.0] * _FACTORS)
    _slow_log: float = field(init=False, default=0.0)

    @property
    def complete(self) -> bool:
        """Whether all lags of the speed are known."""
        return len(self._logs) == _LAGS

    def observe(self, log: float, factors: Factors) -> None:
        """Take in one iteration: the logarithm of its seconds per sample, and the factors known before it."""
        now = _logarithms(factors)
        self._count += 1
        fast, slow = max(1.0 / self._count, _ALPHA), max(1.0 / self._count, _SLOW)
        self._fast = [mean + fast * (value - mean) for mean, value in zip(self._fast, now, strict=True)]
        self._slow = [mean + slow * (value - mean) for mean, value in zip(self._slow, now, strict=True)]
        self._slow_log += slow * (log - self._slow_log)
        self._before = now
        self._logs.appendleft(log)

    def at(self, level: float, factors: Factors) -> list[float]:
        """The inputs, given the logarithm of the average seconds per sample and the factors now."""
        inputs = [log - level for log in self._logs]
        inputs.append(level - self._slow_log)
        for now, before, fast, slow in zip(_logarithms(factors), self._before, self._fast, self._slow, strict=True):
            inputs += (now - fast, before - fast, fast - slow, now)
        return inputs

    def restart(self) -> None:
        """Forget the speeds and restart all averages: with a count of 0, the next iteration replaces them."""
        self._count = 0
        self._logs.clear()


@final
@dataclass(slots=True)
class Narx(Stateful):
    """LB-BSP (arXiv 1806.02508; SoCC'20): v_k = F(v_{k-1}, ..; c_k, c_{k-1}, ..; m_k, m_{k-1}, ..) by a small network.

    A nonlinear autoregressive model with exogenous inputs: past speeds v, and past and present shares c of processors
    and m of memory that the worker can have. It learns one step ahead, on measured speeds, one step of its filter per
    iteration. The paper does not give layer sizes, lags, optimiser or schedule; ours are in `NarxNetwork` and
    `NarxInputs`. The network predicts by how much log speed will differ from an exponential moving average of weight
    0.2. The prediction stays within the range of the last 100 measurements.

    The average's own prediction is used until the network has learned from 50 iterations, and whenever the network's
    one-step error over about the last 50 iterations is not at least 3 % less than the average's. Each prediction is
    made before the measurement that it is compared with. This guard is ours: if neither factors nor past speeds lead
    the speed, a network can only add noise.

    The relative error of a corrected prediction is the average's standard error, with the network's recent one-step
    error (at least 1 %) instead of the noise: the correction passes on the noise that the average passes on, and a
    network that misses much reports a large error.
    """

    uses_factors: ClassVar[bool] = True

    _average: Ema = field(init=False, default_factory=lambda: Ema(_ALPHA))
    _inputs: NarxInputs = field(init=False, default_factory=NarxInputs)
    _network: NarxNetwork = field(init=False, default_factory=lambda: NarxNetwork(WIDTH))
    _recent: Recent = field(init=False, default_factory=lambda: Recent(_WINDOW))
    _error: OneStepError = field(init=False, default_factory=OneStepError)
    _average_error: OneStepError = field(init=False, default_factory=OneStepError)

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
        """The network's value for these factors if it is trusted, else the average's."""
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
        """Forget the speeds; keep the network, the errors of both, the noise level and the last factors."""
        self._average.restart()
        self._inputs.restart()
        self._recent.clear()

    def _learn(self, log: float, factors: Factors) -> None:
        average = self._average.predict(factors)
        assert average is not None
        level = math.log(average.seconds_per_sample)
        judged = self._network.learned >= _JUDGED_FROM
        correction = self._network.learn(self._inputs.at(level, factors), log - level)
        if judged:
            self._error.observe(log - self._recent.clamp(level + correction))
            self._average_error.observe(log - level)


def _logarithms(factors: Factors) -> list[float]:
    return [math.log(_MIN_FACTOR + value) for value in (factors.cpu_availability, factors.memory_availability)]
