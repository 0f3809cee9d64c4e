"""How much one worker's measurements scatter: a relative standard deviation, learned as they come."""

import math
from typing import Final, cast, final

from evenstep.core.load.predict.sample_state import sample_from_state, sample_to_state
from evenstep.core.values import Sample, State

_PRIOR_LEVEL: Final = 0.3
_PRIOR_WEIGHT: Final = 0.25
_MIN_WEIGHT: Final = 1.0 / 40
_FLOOR: Final = 0.01
_ALIKE: Final = 0.02
_CAP: Final = 4.0
_ROOT_TWO: Final = math.sqrt(2.0)
_FASTEST: Final = 1e-15
_SLOWEST: Final = 1e12


def seconds_per_sample(sample: Sample) -> float:
    """The measured seconds per sample, kept within what the averages can compute with: 1e-15 to 1e12."""
    rate = sample.compute_seconds / sample.samples
    # Compared by hand, as below: min and max take longer than all the rest, for every worker and iteration.
    return _FASTEST if rate < _FASTEST else _SLOWEST if rate > _SLOWEST else rate


@final
class Noise:
    """The relative standard deviation of a single measurement, from neighbouring measurements of like size.

    Differences of neighbours leave out what is not noise: a drift, a change of speed (which counts once) and a time
    model that is wrong for other sizes. Each counts as four standard deviations at most. The level starts at 30 %, and
    that start counts as a quarter of a difference, so that one lucky agreement is not yet taken for precision; later it
    averages over about the last 40 differences.

    Attributes:
        level: The relative standard deviation, at least one per cent.
    """

    __slots__ = ("_before", "_count", "_rate_before", "_variance", "level")

    def __init__(self) -> None:
        self._variance = _PRIOR_LEVEL**2
        self.level = _level(self._variance)
        self._count = 0
        self._before: Sample | None = None
        self._rate_before = 0.0

    def observe(self, sample: Sample) -> None:
        before, rate_before = self._before, self._rate_before
        rate = seconds_per_sample(sample)
        self._before, self._rate_before = sample, rate
        if before is None or abs(sample.samples - before.samples) > _ALIKE * before.samples:
            return
        deviation = abs(math.log(rate / rate_before) / _ROOT_TWO)
        most = _CAP * self.level
        if deviation > most:
            deviation = most
        self._count += 1
        weight = 1.0 / (self._count + _PRIOR_WEIGHT)
        if weight < _MIN_WEIGHT:
            weight = _MIN_WEIGHT
        self._variance += weight * (deviation * deviation - self._variance)
        self.level = _level(self._variance)

    def state_dict(self) -> State:
        return {
            "variance": self._variance,
            "count": self._count,
            "before": None if self._before is None else sample_to_state(self._before),
        }

    def load_state_dict(self, state: State) -> None:
        self._variance = cast("float", state["variance"])
        self.level = _level(self._variance)
        self._count = cast("int", state["count"])
        before = cast("State | None", state["before"])
        self._before = None if before is None else sample_from_state(before)
        self._rate_before = 0.0 if self._before is None else seconds_per_sample(self._before)


def _level(variance: float) -> float:
    level = math.sqrt(variance)
    return level if level > _FLOOR else _FLOOR
