"""Costs of samples, given in a cluster file or a command: a distribution, for the simulator."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from statistics import NormalDist
from types import MappingProxyType
from typing import Annotated, Final, TypeAlias, final

from evenstep.cluster.record import POSITIVE, Defined, require_ranges
from evenstep.cluster.slowness.draw import Purpose, uniform
from evenstep.core.errors import ConfigError
from evenstep.core.shown import shown

_NORMAL: Final = NormalDist()


@final
@dataclass(frozen=True, slots=True)
class LogNormal:
    """Costs whose logarithm is normal, as is common for text lengths; `sigma` is its standard deviation, 0 to 5.

    Raises:
        ConfigError: sigma is out of range.
    """

    sigma: Annotated[float, POSITIVE]

    def __post_init__(self) -> None:
        require_ranges(self)
        if self.sigma > 5:  # With 5, one sample in a million costs 10^10 times the median.
            raise ConfigError(f"sigma must be at most 5, not {shown(self.sigma)}")

    def quantile(self, part: float) -> float:
        return math.exp(self.sigma * _NORMAL.inv_cdf(part))

    def __str__(self) -> str:
        return f"lognormal {self.sigma:g}"


@final
@dataclass(frozen=True, slots=True)
class Uniform:
    """Costs with equal frequency from `least` (> 0) to `most`.

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


CostDistribution: TypeAlias = LogNormal | Uniform
"""A distribution of costs; `COSTS` reads it from its text."""

DISTRIBUTIONS: Final[Mapping[str, type[CostDistribution]]] = {"lognormal": LogNormal, "uniform": Uniform}


@final
@dataclass(frozen=True, slots=True)
class _CostRule:
    """A text with the name of a distribution and its parameters."""

    def read(self, name: str, value: object, defined: Defined = MappingProxyType({})) -> CostDistribution:
        """Read the distribution.

        >>> COSTS.read("costs", "uniform 1 9")
        Uniform(least=1.0, most=9.0)
        """
        words = value.split() if isinstance(value, str) else []
        made = DISTRIBUTIONS.get(words[0] if words else "")
        if made is not None and len(words) == 1 + len(fields(made)):
            try:
                return made(*(float(word) for word in words[1:]))
            except ConfigError as error:
                raise ConfigError(f"{name} {value!r}: {error}") from None
            except ValueError:
                pass  # Not a number.
        raise ConfigError(f'{name} must be a distribution such as "lognormal 1.0" or "uniform 1 9", not {shown(value)}')


COSTS: Final = _CostRule()


def draw_costs(distribution: CostDistribution, count: int, seed: int) -> list[float]:
    """Draw the costs of `count` samples, the same for the same seed."""
    return [distribution.quantile(uniform(seed, Purpose.COST, 0, index)) for index in range(count)]
