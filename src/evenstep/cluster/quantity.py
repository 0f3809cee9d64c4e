"""Numbers with a unit, as people write them in files and on command lines."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from types import MappingProxyType
from typing import Final, final

from evenstep.core.errors import ConfigError
from evenstep.core.shown import shown

_NUMBER_AND_UNIT: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([A-Za-z%/]+)")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A kind of quantity: how it is called, an example of it, and its units with their worth in the base unit."""

    description: str
    example: str
    units: Mapping[str, Decimal]

    def parse(self, value: object) -> float:
        """The number in the base unit, >= 0, rounded once; ConfigError, beginning "must be", for anything else.

        >>> DURATION.parse("0.72 ms")
        0.00072
        """
        match = _NUMBER_AND_UNIT.fullmatch(value) if isinstance(value, str) else None
        if match is not None and match[2] in self.units:
            # In decimal: 0.72 * 0.001 in binary is rounded twice and prints as 0.0007199999999999999.
            number = float(Decimal(match[1]) * self.units[match[2]])
            if math.isfinite(number):
                return number
        units = ", ".join(self.units)
        raise ConfigError(f'must be a {self.description} such as "{self.example}" (units: {units}), not {shown(value)}')


DURATION: Final = Quantity(
    description="duration",
    example="10 ms",
    units=MappingProxyType({"s": Decimal(1), "ms": Decimal("1e-3"), "us": Decimal("1e-6")}),
)
"""In seconds."""

BANDWIDTH: Final = Quantity(
    description="bandwidth",
    example="10 Gbit/s",
    units=MappingProxyType({"Gbit/s": Decimal(10**9), "Mbit/s": Decimal(10**6)}),
)
"""In bits per second."""

CAPACITY: Final = Quantity(
    description="memory size",
    example="8 GB",
    units=MappingProxyType({"GB": Decimal(10**9), "MB": Decimal(10**6), "KB": Decimal(10**3)}),
)
"""In bytes."""

SHARE: Final = Quantity(description="share", example="5 %", units=MappingProxyType({"%": Decimal("1e-2")}))
"""As a fraction: 5 % is 0.05."""
