"""Jitter: every iteration a little faster or slower than the last."""

import math
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Final, final

from evenstep.cluster.slowness.draw import Purpose, require_seed, uniform
from evenstep.cluster.slowness.require import require_at_least
from evenstep.cluster.slowness.slowness import Slowness

_NORMAL: Final = NormalDist()
_PURPOSE: Final = int(Purpose.JITTER)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Jitter:
    """Multiplies the seconds of every worker by a lognormal factor of mean 1, independent for each iteration.

    exp(sigma z - sigma^2 / 2) with z standard normal has mean 1, and relative standard deviation `spread` where
    sigma^2 = ln(1 + spread^2).

    Attributes:
        spread: Relative standard deviation of the factor, >= 0; 0.05: five per cent.
        seed: From 0 to 2**64 - 1.

    Raises:
        ConfigError: A value lies outside its range.
    """

    spread: float
    seed: int
    _variance: float = field(init=False, repr=False, compare=False)
    _sigma: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Refuse values outside their ranges, and work out what every draw needs."""
        require_at_least("spread", self.spread, 0)
        require_seed(self.seed)
        object.__setattr__(self, "_variance", math.log1p(self.spread**2))
        object.__setattr__(self, "_sigma", math.sqrt(self._variance))

    def seconds(self, *, worker: int, iteration: int, batch_size: int, natural_seconds: float, now: float) -> float:
        """The natural seconds times the factor of this worker and iteration."""
        normal = _NORMAL.inv_cdf(uniform(self.seed, _PURPOSE, worker, iteration))
        return natural_seconds * math.exp(self._sigma * normal - self._variance / 2)

    def slowness(self, before: Slowness, *, worker: int, iteration: int) -> Slowness:
        """As before: this is new in every iteration."""
        return before
