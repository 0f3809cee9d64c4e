"""How much one worker's measurements scatter: a relative standard deviation, learned as they come."""

import math
from typing import Final, cast, final

from evenstep.core.values import Sample, State

_PRIOR_LEVEL: Final = 0.3
_PRIOR_WEIGHT: Final = 0.5
_MEMORY: Final = 40
_FLOOR: Final = 0.01
_FASTEST: Final = 1e-15
_SLOWEST: Final = 1e12


def seconds_per_sample(sample: Sample) -> float:
    """The measured seconds per sample, kept within what the averages can compute with: 1e-15 to 1e12."""
    return min(max(sample.compute_seconds / sample.samples, _FASTEST), _SLOWEST)


@final
class Noise:
    """The relative standard deviation of a single measurement, from the logarithms of measured over expected.

    It starts wide (30 %) and the start counts as half an observation, so that a lucky agreement of the first few
    measurements is not taken for precision but ten of them are; it averages over about the last 40 deviations.
    """

    __slots__ = ("_count", "_variance")

    def __init__(self) -> None:
        self._variance = _PRIOR_LEVEL**2
        self._count = 0

    @property
    def level(self) -> float:
        """The relative standard deviation, at least one per cent."""
        return max(math.sqrt(self._variance), _FLOOR)

    def observe(self, deviation: float) -> None:
        """Take in the logarithm of measured over expected, in units of a single measurement's noise."""
        self._count += 1
        weight = max(1.0 / (self._count + _PRIOR_WEIGHT), 1.0 / _MEMORY)
        self._variance += weight * (deviation * deviation - self._variance)

    def state_dict(self) -> State:
        """Everything that `load_state_dict` needs to go on bit for bit."""
        return {"variance": self._variance, "count": self._count}

    def load_state_dict(self, state: State) -> None:
        """Go on where the given state was taken."""
        self._variance = cast("float", state["variance"])
        self._count = cast("int", state["count"])
