"""How far a predictor's predictions lately were from what came."""

import math
from typing import Final, cast, final

from evenstep.core.values import State

_MEMORY: Final = 50


@final
class OneStepError:
    """The mean square of log(measured / predicted), predictions made before the measurement, over about the last 50."""

    __slots__ = ("_count", "_mean_square")

    def __init__(self) -> None:
        self._count = 0
        self._mean_square = 0.0

    @property
    def root(self) -> float:
        """The root of the mean square; 0 before any comparison."""
        return math.sqrt(self._mean_square)

    def observe(self, difference: float) -> None:
        """Take in the logarithm of measured over predicted."""
        self._count += 1
        weight = max(1.0 / self._count, 1.0 / _MEMORY)
        self._mean_square += weight * (difference * difference - self._mean_square)

    def state_dict(self) -> State:
        return {"count": self._count, "mean_square": self._mean_square}

    def load_state_dict(self, state: State) -> None:
        self._count = cast("int", state["count"])
        self._mean_square = cast("float", state["mean_square"])
