"""What the NARX network sees of one worker: its past speeds, and the factors past and present."""

import math
from collections import deque
from typing import Final, cast, final

from evenstep.core.values import Factors, State

_LAGS: Final = 3
_FACTORS: Final = 2
_SLOW: Final = 0.03
_MIN_FACTOR: Final = 0.02

WIDTH: Final = _LAGS + 1 + 4 * _FACTORS
"""How many inputs the network has."""


@final
class NarxInputs:
    """The inputs of the network at iteration k; those of the speed are ratios, so that the unit does not matter.

    Of the speed v: v_{k-1}, v_{k-2} and v_{k-3} over the average that the network corrects, and that average over a
    slower one. Of each factor c: c_k and c_{k-1} over its average with the same weights as the speed's, that average
    over a slower one, and c_k itself. The averages stand for all older lags. All are logarithms, so that a speed in
    proportion to a factor is a straight line; a factor counts as 0.02 more than it is, so that 0 has one. The paper
    does not say which lags it takes.
    """

    __slots__ = ("_alpha", "_before", "_count", "_fast", "_logs", "_slow", "_slow_log")

    def __init__(self, alpha: float) -> None:
        self._alpha = alpha
        self._before = [0.0] * _FACTORS
        self._count = 0
        self._logs: deque[float] = deque(maxlen=_LAGS)
        self._fast = [0.0] * _FACTORS
        self._slow = [0.0] * _FACTORS
        self._slow_log = 0.0

    @property
    def complete(self) -> bool:
        """Whether all lags of the speed are known."""
        return len(self._logs) == _LAGS

    def observe(self, log: float, factors: Factors) -> None:
        """Take in one iteration: the logarithm of its seconds per sample, and the factors known before it."""
        now = _logarithms(factors)
        self._count += 1
        fast, slow = max(1.0 / self._count, self._alpha), max(1.0 / self._count, _SLOW)
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
        """Forget the speeds and start all averages afresh."""
        # With a count of 0 the next iteration replaces the averages.
        self._count = 0
        self._logs.clear()

    def state_dict(self) -> State:
        return {
            "count": self._count,
            "logs": list(self._logs),
            "slow_log": self._slow_log,
            "before": list(self._before),
            "fast": list(self._fast),
            "slow": list(self._slow),
        }

    def load_state_dict(self, state: State) -> None:
        lists = cast("dict[str, list[float]]", state)
        self._count = cast("int", state["count"])
        self._slow_log = cast("float", state["slow_log"])
        self._logs = deque(lists["logs"], maxlen=_LAGS)
        self._before, self._fast, self._slow = (list(lists[name]) for name in ("before", "fast", "slow"))


def _logarithms(factors: Factors) -> list[float]:
    return [math.log(_MIN_FACTOR + value) for value in (factors.cpu_availability, factors.memory_availability)]
