"""What one worker knows about its own speed, and tells the others in integers."""

import math
from collections.abc import Callable
from typing import Final, cast, final

from evenstep.core.load.predict.base import Predictor
from evenstep.core.load.times.shape import Shape
from evenstep.core.values import Estimate, Factors, Sample, State

_LARGEST_RATE: Final = 10**12
_LARGEST_FIXED: Final = 10**15
_LARGEST_ERROR: Final = 10**7
_LARGEST_SIZE: Final = 10**9
_CLOCK_STEP: Final = 1e-9
_SAME_SIZE: Final = 0.1
_UNKNOWN: Final = Factors()


@final
class Estimator:
    """Predicts one worker's time from its own iterations: t = s * (c + max(x, f)) for x samples.

    `predictor` follows s, the seconds per effective sample. c, the fixed part, and f, the flat start, both in samples,
    are fitted beside it as the `shape` of its time; without one both are 0, and time is in proportion to the size. A
    slowdown scales s and keeps the shape. Iterations without a sample are not counted, nor are the first `warmup` of
    the others (allocator, kernel search, compilation). On a device whose times are read one iteration late, the first
    iteration is one without a sample.
    """

    __slots__ = ("_predictor", "_seen", "_shape", "_warmup")

    def __init__(self, predictor: Callable[[], Predictor], *, shape: Shape | None = None, warmup: int = 2) -> None:
        self._predictor = predictor()
        self._shape = shape
        self._warmup = warmup
        self._seen = 0

    @property
    def uses_factors(self) -> bool:
        """Whether estimates depend on the factors, which are sampled only then."""
        return self._predictor.uses_factors

    def observe(self, samples: int, compute_seconds: float, factors: Factors | None = None) -> None:
        """Take in one iteration, oldest first: `compute_seconds` of pure compute, without any waiting.

        Raises:
            ValueError: where a number is negative or not finite.
        """
        if samples < 0 or not 0.0 <= compute_seconds < math.inf:
            raise ValueError(f"{samples} samples cannot take {compute_seconds} seconds: both must be finite and >= 0")
        if samples == 0:
            return
        self._seen += 1
        if self._seen <= self._warmup:
            return
        # By position here and below, and without min and max: this is done for every worker and iteration.
        sample = Sample(samples, compute_seconds if compute_seconds > _CLOCK_STEP else _CLOCK_STEP, factors or _UNKNOWN)
        if self._shape is None:
            self._predictor.observe(sample)
        elif self._shape.observe(sample):
            # Other sizes than today's found the shape; the speed on it is today's, where a curve is no line.
            self._predictor.restart()
            for past in self._shape.window:
                if abs(past.samples / samples - 1.0) < _SAME_SIZE:
                    self._predictor.observe(self._shape.effective(past))
        else:
            self._predictor.observe(self._shape.effective(sample))

    def estimate(self, factors: Factors | None = None) -> Estimate:
        """The next iteration's time, given what is known before it; all zero as long as nothing is known."""
        prediction = self._predictor.predict(factors or _UNKNOWN)
        if prediction is None:
            return Estimate()
        seconds_per_sample, relative_error = prediction
        rate = seconds_per_sample * 1e9
        per_sample = _integer(rate, _LARGEST_RATE) or 1
        error_ppm = _integer(relative_error * 1e6, _LARGEST_ERROR)
        if self._shape is None:
            return Estimate(per_sample, 0, error_ppm, 0)
        fixed = _integer(rate * self._shape.fixed_samples, _LARGEST_FIXED)
        return Estimate(per_sample, fixed, error_ppm, _integer(self._shape.flat_samples, _LARGEST_SIZE))

    def state_dict(self) -> State:
        """Everything that `load_state_dict` needs to go on bit for bit."""
        return {
            "seen": self._seen,
            "predictor": self._predictor.state_dict(),
            "shape": None if self._shape is None else self._shape.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        """Go on where the given state was taken."""
        self._seen = cast("int", state["seen"])
        self._predictor.load_state_dict(cast("State", state["predictor"]))
        if self._shape is not None:
            self._shape.load_state_dict(cast("State", state["shape"]))


def _integer(value: float, largest: int) -> int:
    return round(value) if value < largest else largest
