"""The line through one worker's times over its batch sizes, and how well it is known."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul
from typing import Final, Self, final

from evenstep.core.values import Sample

MIN_SPREAD: Final = 0.02
MIN_ELASTICITY: Final = 1.0 / 11.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line through times over sizes: at the mean `size`, one per cent more size is `elasticity` per cent more time.

    An elasticity of 1 is a line through the origin, 0 a time that does not depend on the size; `error` is its standard
    error.
    """

    size: float
    elasticity: float
    error: float

    @property
    def fixed_samples(self) -> float:
        """Intercept over slope, in samples: at least 0, and at most ten times the mean size."""
        elasticity = min(max(self.elasticity, MIN_ELASTICITY), 1.0)
        return self.size * (1.0 / elasticity - 1.0)

    @classmethod
    def through(cls, samples: Sequence[Sample], noise: float, *, flat: float = 0.0) -> Self | None:
        """By least squares of the relative residuals, since noise is relative; None where the sizes are too alike.

        `noise` is the relative standard deviation of a time; sizes below `flat` count as `flat`.
        """
        sizes = [sample.samples if sample.samples > flat else flat for sample in samples]
        least = min(sizes)
        if max(sizes) < (1.0 + MIN_SPREAD) * least:
            return None
        # Scaled by the last time and the least size, so that the sums neither overflow nor vanish. The weight of a
        # time is its inverse square, so that its product with the time is the inverse.
        unit = samples[-1].compute_seconds
        inverses = [unit / sample.compute_seconds for sample in samples]
        weights = [inverse * inverse for inverse in inverses]
        offsets = [size / least - 1.0 for size in sizes]
        weighted = list(map(mul, weights, offsets))
        w, wd, wdd = sum(weights), sum(weighted), sum(map(mul, weighted, offsets))
        wt, wdt = sum(inverses), sum(map(mul, inverses, offsets))
        mean = 1.0 + wd / w
        level = wt / w
        spread = (wdd - wd * wd / w) / mean**2
        if spread <= 0.0:
            return None
        elasticity = (wdt - wd * wt / w) / (mean * spread * level)
        error = noise * math.sqrt(1.0 / spread + elasticity**2 / w) / level
        return cls(size=mean * least, elasticity=elasticity, error=error)
