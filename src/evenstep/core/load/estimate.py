"""What one worker knows about its own speed, and tells the others in integers."""

import math
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from typing import Final, final

from evenstep.core.load.predict.base import Predictor
from evenstep.core.load.shape import Shape
from evenstep.core.state import Stateful
from evenstep.core.values import Estimate, Factors, Sample

_LARGEST_RATE: Final = 10**12
_LARGEST_FIXED: Final = 10**15
_LARGEST_ERROR: Final = 10**7
_LARGEST_SIZE: Final = 10**9
_CLOCK_STEP: Final = 1e-9
_SAME_SIZE: Final = 0.1
_ALIKE: Final = 0.02
_UNKNOWN: Final = Factors()


@final
@dataclass(slots=True)
class Estimator(Stateful):
    """Predicts one worker's time from its own iterations: t = s * (c + max(x, f)) for x samples.

    The predictor follows s, the seconds per effective sample. c, the fixed part, and f, the flat start, both in
    samples, are fitted beside it as the `shape` of the time. Without a shape both are 0, and time is in proportion to
    the size. A slowdown scales s and keeps the shape.

    Iterations without a sample are not counted, nor are the first `warmup` others (allocator, kernel search,
    compilation). On a device whose times are read one iteration late, the first iteration has no sample.

    Args:
        predictor: Makes the predictor of s, such as one of `PREDICTORS`.
        shape: A new one, or None.
        warmup: How many iterations are not counted at first.
        block_seconds: Iterations of alike sizes are added up until they have taken this long, and observed as one.
    """

    predictor: InitVar[Callable[[], Predictor]]
    shape: Shape | None = field(default=None, kw_only=True)
    warmup: int = field(default=2, kw_only=True)
    block_seconds: float = field(default=0.0, kw_only=True)
    _predictor: Predictor = field(init=False)
    _seen: int = field(init=False, default=0)
    # The present block.
    _iterations: int = field(init=False, default=0)
    _samples: float = field(init=False, default=0.0)
    _seconds: float = field(init=False, default=0.0)

    def __post_init__(self, predictor: Callable[[], Predictor]) -> None:
        self._predictor = predictor()

    @property
    def uses_factors(self) -> bool:
        """Whether estimates depend on the factors, which are sampled only then."""
        return self._predictor.uses_factors

    def observe(self, samples: float, compute_seconds: float, factors: Factors | None = None) -> None:
        """Take in one iteration, oldest first: `compute_seconds` of pure compute, without any waiting.

        Raises:
            ValueError: A number is negative or not finite.
        """
        if samples < 0 or not 0.0 <= compute_seconds < math.inf:
            raise ValueError(f"{samples} samples cannot take {compute_seconds} seconds: both must be finite and >= 0")
        if samples == 0:
            return
        self._seen += 1
        if self._seen <= self.warmup:
            return
        if self._iterations and abs(samples * self._iterations - self._samples) > _ALIKE * self._samples:
            self.end_block(factors)
        self._iterations += 1
        self._samples += samples
        self._seconds += compute_seconds
        if self._seconds >= self.block_seconds:
            self.end_block(factors)

    def end_block(self, factors: Factors | None = None) -> None:
        """Learn from the iterations of the present block, however short it is, and begin the next."""
        if not self._iterations:
            return
        samples, seconds = self._samples / self._iterations, self._seconds / self._iterations
        self._iterations, self._samples, self._seconds = 0, 0.0, 0.0
        # By position, and without min and max: this runs for every worker and iteration.
        sample = Sample(samples, seconds if seconds > _CLOCK_STEP else _CLOCK_STEP, factors or _UNKNOWN)
        shape, predictor = self.shape, self._predictor
        if shape is None:
            predictor.observe(sample)
            return
        effective = shape.effective(sample)
        if not shape.observe(sample, effective):
            predictor.observe(effective)
            return
        # Only sizes like this one: where a curve is not a line, the speed on it differs for other sizes.
        predictor.restart()
        for past in shape.window:
            if abs(past.samples / samples - 1.0) < _SAME_SIZE:
                predictor.observe(shape.effective(past))

    def estimate(self, factors: Factors | None = None) -> Estimate:
        """The next iteration's time, given the factors known before it; all zero before anything is known."""
        prediction = self._predictor.predict(factors or _UNKNOWN)
        if prediction is None:
            return Estimate()
        seconds_per_sample, relative_error = prediction
        rate = seconds_per_sample * 1e9
        per_sample = _integer(rate, _LARGEST_RATE) or 1
        error_ppm = _integer(relative_error * 1e6, _LARGEST_ERROR)
        shape = self.shape
        if shape is None:
            return Estimate(per_sample, 0, error_ppm, 0)
        fixed, flat = shape.fixed_samples, shape.flat_samples
        return Estimate(
            per_sample,
            _integer(rate * fixed, _LARGEST_FIXED) if fixed else 0,
            error_ppm,
            _integer(flat, _LARGEST_SIZE) if flat else 0,
        )


def _integer(value: float, largest: int) -> int:
    return round(value) if value < largest else largest
