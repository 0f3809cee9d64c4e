"""What samples cost, as a cluster file or a command says it: a distribution, for the simulator."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from types import MappingProxyType
from typing import Annotated, Final, Protocol, final

from evenstep.cluster.record import POSITIVE, Defined, require_ranges
from evenstep.cluster.slowness.draw import Purpose, uniform
from evenstep.core.errors import ConfigError
from evenstep.core.shown import shown

_MAX_SIGMA: Final = 5
_NORMAL: Final = NormalDist()


class CostDistribution(Protocol):
    """A distribution of costs; its text is what `COSTS` reads."""

    def quantile(self, part: float) -> float:
        """The cost (> 0) below which this part of the samples is, 0 to 1, both excluded."""


@final
@dataclass(frozen=True, slots=True)
class LogNormal:
    """Costs whose logarithm is normal, as lengths of texts often are; `sigma` is its standard deviation, 0 to 5.

    Raises:
        ConfigError: sigma is out of range.
    """

    sigma: Annotated[float, POSITIVE]

    def __post_init__(self) -> None:
        require_ranges(self)
        if self.sigma > _MAX_SIGMA:
            raise ConfigError(f"sigma must be at most {_MAX_SIGMA}, not {shown(self.sigma)}")

    def quantile(self, part: float) -> float:
        return math.exp(self.sigma * _NORMAL.inv_cdf(part))

    def __str__(self) -> str:
        return f"lognormal {self.sigma:g}"


@final
@dataclass(frozen=True, slots=True)
class Uniform:
    """Costs of which all between `least` (> 0) and `most` are equally frequent.

    Raises:
        ConfigError: They are out of range, or `most` is below `least`.
    """

    least: Annotated[float, POSITIVE]
    most: Annotated[float, POSITIVE]

    def __post_init__(self) -> None:
        require_ranges(self)
        if self.most < self.least:
            raise ConfigError(f"most must be at least {self.least:g}, not {shown(self.most)}")

    def quantile(self, part: float) -> float:
        return self.least + part * (self.most - self.least)

    def __str__(self) -> str:
        return f"uniform {self.least:g} {self.most:g}"


DISTRIBUTIONS: Final[Mapping[str, tuple[Callable[..., CostDistribution], int]]] = MappingProxyType(
    {"lognormal": (LogNormal, 1), "uniform": (Uniform, 2)}
)
"""By name: the distribution, and how many numbers it takes."""


@final
@dataclass(frozen=True, slots=True)
class _CostRule:
    """A text with the name of a distribution and its numbers."""

    def read(self, name: str, value: object, defined: Defined = MappingProxyType({})) -> CostDistribution:
        """The distribution.

        >>> COSTS.read("costs", "uniform 1 9")
        Uniform(least=1.0, most=9.0)
        """
        words = value.split() if isinstance(value, str) else []
        made, count = DISTRIBUTIONS.get(words[0] if words else "", (None, 0))
        if made is not None and len(words) == 1 + count:
            try:
                return made(*(float(word) for word in words[1:]))
            except ConfigError as error:
                raise ConfigError(f"{name} {value!r}: {error}") from None
            except ValueError:
                pass  # A word is no number.
        raise ConfigError(f'{name} must be a distribution such as "lognormal 1.0" or "uniform 1 9", not {shown(value)}')


COSTS: Final = _CostRule()


def draw_costs(distribution: CostDistribution, count: int, seed: int) -> list[float]:
    """The costs of so many samples, the same for the same seed."""
    return [distribution.quantile(uniform(seed, Purpose.COST, 0, index)) for index in range(count)]
