"""How much one worker's measurements scatter: a relative standard deviation, learned as they come."""

import math
from typing import Final, cast, final

from evenstep.core.load.predict.sample_state import sample_from_state, sample_to_state
from evenstep.core.values import Sample, State

_PRIOR_LEVEL: Final = 0.3
_PRIOR_WEIGHT: Final = 0.25
_MEMORY: Final = 40
_FLOOR: Final = 0.01
_ALIKE: Final = 0.02
_CAP: Final = 4.0
_FASTEST: Final = 1e-15
_SLOWEST: Final = 1e12


def seconds_per_sample(sample: Sample) -> float:
    """The measured seconds per sample, kept within what the averages can compute with: 1e-15 to 1e12."""
    return min(max(sample.compute_seconds / sample.samples, _FASTEST), _SLOWEST)


@final
class Noise:
    """The relative standard deviation of a single measurement, from neighbouring measurements of like size.

    Differences of neighbours leave out what is not noise: a drift, a change of speed (which counts once) and a time
    model that is wrong for other sizes. Each counts as four standard deviations at most. The level starts at 30 %, and
    that start counts as a quarter of a difference, so that one lucky agreement is not yet taken for precision; later it
    averages over about the last 40 differences.
    """

    __slots__ = ("_before", "_count", "_variance")

    def __init__(self) -> None:
        self._variance = _PRIOR_LEVEL**2
        self._count = 0
        self._before: Sample | None = None

    @property
    def level(self) -> float:
        """The relative standard deviation, at least one per cent."""
        return max(math.sqrt(self._variance), _FLOOR)

    def observe(self, sample: Sample) -> None:
        before, self._before = self._before, sample
        if before is None or abs(sample.samples - before.samples) > _ALIKE * before.samples:
            return
        difference = math.log(seconds_per_sample(sample) / seconds_per_sample(before)) / math.sqrt(2.0)
        deviation = min(abs(difference), _CAP * self.level)
        self._count += 1
        weight = max(1.0 / (self._count + _PRIOR_WEIGHT), 1.0 / _MEMORY)
        self._variance += weight * (deviation * deviation - self._variance)

    def state_dict(self) -> State:
        return {
            "variance": self._variance,
            "count": self._count,
            "before": None if self._before is None else sample_to_state(self._before),
        }

    def load_state_dict(self, state: State) -> None:
        self._variance = cast("float", state["variance"])
        self._count = cast("int", state["count"])
        before = cast("State | None", state["before"])
        self._before = None if before is None else sample_from_state(before)
