"""Tables of a cluster file as typed records: the annotations of a dataclass say which values its keys accept.

The metadata of an annotation are the rules applied to a value in turn, and the key if it is not the field's name:
`latency_seconds: Annotated[float, "latency", DURATION, NOT_NEGATIVE] = 0.0`. `decode` turns a table into a record. A
record calls `require_ranges` for values that come from Python.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from decimal import Decimal
from functools import cache
from numbers import Integral, Real
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol, TypeVar, cast, final, get_type_hints

from evenstep.core.errors import ConfigError
from evenstep.core.nearest import nearest
from evenstep.core.shown import shown

T = TypeVar("T")

Defined = Mapping[str, Mapping[str, object]]
"""The tables that a record may refer to: by kind, their names and values."""

_NONE: Final[Defined] = MappingProxyType({})
_NUMBER_AND_UNIT: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([A-Za-z%/]+)")


class Rule(Protocol):
    """A rule for the values of one key."""

    def read(self, name: str, value: object, defined: Defined = _NONE) -> object:
        """Convert the value; if it is not valid, ConfigError with a sentence that begins with `name`."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A finite number of at least `least`, or greater than `least` if `strict`. An int is at most `most`."""

    least: int = 0
    strict: bool = False
    most: int = 10**20
    whole: bool = False

    def read(self, name: str, value: object, defined: Defined = _NONE) -> object:
        bound = f"greater than {self.least}" if self.strict else f"of at least {self.least}"
        # true is a Python int too.
        if not isinstance(value, bool) and isinstance(value, Integral if self.whole else Real):
            number = cast("float", value)
            if isinstance(value, Integral) and number > self.most:
                bound = f"of at most {self.most}"
            elif self.least <= number < math.inf and not (self.strict and number == self.least):
                return value
        noun = "whole" if self.whole else "finite"
        raise ConfigError(f"{name} must be a {noun} number {bound}, not {shown(value)}")


WHOLE: Final = Number(whole=True)
FROM_ONE: Final = Number(whole=True, least=1)
SEED: Final = Number(whole=True, most=2**64 - 1)
NOT_NEGATIVE: Final = Number()
POSITIVE: Final = Number(strict=True)
FACTOR: Final = Number(least=1)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A text with a number and one of `units`, which maps to its worth in the base unit; rounded down if `whole`."""

    description: str
    example: str
    units: Mapping[str, Decimal]
    whole: bool = False

    def read(self, name: str, value: object, defined: Defined = _NONE) -> float:
        """Return the number in the base unit, >= 0.

        >>> DURATION.read("fixed", "0.72 ms")
        0.00072
        """
        match = _NUMBER_AND_UNIT.fullmatch(value) if isinstance(value, str) else None
        if match is not None and match[2] in self.units:
            # Decimal, because 0.72 * 0.001 in binary is rounded twice and prints as 0.0007199999999999999.
            number = float(Decimal(match[1]) * self.units[match[2]])
            if math.isfinite(number):
                return int(number) if self.whole else number
        form = f'a {self.description} such as "{self.example}" (units: {", ".join(self.units)})'
        raise ConfigError(f"{name} must be {form}, not {shown(value)}")


DURATION: Final = Quantity(
    description="duration",
    example="10 ms",
    units=MappingProxyType({"s": Decimal(1), "ms": Decimal("1e-3"), "us": Decimal("1e-6")}),
)
BANDWIDTH: Final = Quantity(
    description="bandwidth",
    example="10 Gbit/s",
    units=MappingProxyType({"Gbit/s": Decimal(10**9), "Mbit/s": Decimal(10**6)}),
)
CAPACITY: Final = Quantity(
    description="memory size",
    example="8 GB",
    units=MappingProxyType({"GB": Decimal(10**9), "MB": Decimal(10**6), "KB": Decimal(10**3)}),
    whole=True,
)
"""In bytes."""
SHARE: Final = Quantity(description="share", example="5 %", units=MappingProxyType({"%": Decimal("1e-2")}))
"""A fraction: 0.05 is 5 %."""


@final
@dataclass(frozen=True, slots=True)
class Named:
    """The name of a defined table of the given kind."""

    kind: str

    def read(self, name: str, value: object, defined: Defined = _NONE) -> object:
        if not isinstance(value, str):
            raise ConfigError(f"{name} must be a name in quotes, not {shown(value)}")
        valid = defined.get(self.kind, {})
        if value not in valid:
            raise ConfigError(f"{name} {shown(value)} is unknown; {nearest(value, valid)}")
        return valid[value]


@final
@dataclass(frozen=True, slots=True)
class Listed:
    """A list whose items each obey a rule."""

    rule: Rule

    def read(self, name: str, value: object, defined: Defined = _NONE) -> object:
        if not isinstance(value, list):
            raise ConfigError(f"{name} must be a list in square brackets, not {shown(value)}")
        return tuple(self.rule.read(f"{name}[{at}]", item, defined) for at, item in enumerate(value))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A list of two values, such as `example`, from which `make` makes a value."""

    rules: tuple[Rule, Rule]
    example: str
    make: Callable[..., object] = lambda *pair: pair

    def read(self, name: str, value: object, defined: Defined = _NONE) -> object:
        if not isinstance(value, list) or len(value) != 2:
            raise ConfigError(f"{name} must be a pair such as {self.example}, not {shown(value)}")
        return self.make(*(rule.read(f"{name}[{at}]", value[at], defined) for at, rule in enumerate(self.rules)))


class _Field(NamedTuple):
    attribute: str
    rules: tuple[Rule, ...]
    required: bool


@cache
def _fields(record: Callable[..., object]) -> Mapping[str, _Field]:
    """The fields of a record that have rules, by key."""
    assert isinstance(record, type)
    hints = get_type_hints(record, include_extras=True)
    found = {}
    for field in fields(record):
        metadata = getattr(hints[field.name], "__metadata__", ())
        key = next((each for each in metadata if isinstance(each, str)), field.name)
        rules = tuple(each for each in metadata if not isinstance(each, str))
        if rules:
            found[key] = _Field(attribute=field.name, rules=rules, required=field.default is MISSING)
    return found


def as_table(value: object) -> Mapping[str, object]:
    """Return the value if it is a table; ConfigError otherwise."""
    if not isinstance(value, dict):
        raise ConfigError(f"this must be a table, not {shown(value)}")
    return value


def keys_of(record: Callable[..., object]) -> tuple[str, ...]:
    """The keys of a record's table."""
    return tuple(_fields(record))


def require_keys(table: Mapping[str, object], valid: Iterable[str]) -> None:
    """Raise ConfigError if the table has a key that is not in `valid`."""
    names = list(valid)
    for key in table:
        if key not in names:
            raise ConfigError(f"there is no key {shown(key)} here; {nearest(key, names)}")


def require_ranges(record: object) -> None:
    """Raise ConfigError unless the numbers of a record lie in their ranges."""
    made_by: Callable[..., object] = type(record)
    for field in _fields(made_by).values():
        value = getattr(record, field.attribute)
        for rule in field.rules:
            if isinstance(rule, Number) and value is not None:
                rule.read(field.attribute, value)


def decode(
    record: Callable[..., T],
    value: object,
    defined: Defined = _NONE,
    *,
    other_keys: tuple[str, ...] = (),
    **given: object,
) -> T:
    """Make the record that a table describes.

    Args:
        record: A dataclass with annotations as above.
        value: The table, as TOML gives it.
        defined: The tables that it may refer to.
        other_keys: Keys of the table that the caller reads.
        given: Fields that the caller knows; they are not keys of the table.

    Raises:
        ConfigError: The value is not a table, or a key is unknown, missing or has a wrong value. The message does not
            say where the table is; `naming` adds that.
    """
    table = as_table(value)
    keys = {key: field for key, field in _fields(record).items() if field.attribute not in given}
    require_keys(table, (*other_keys, *keys))
    values = dict(given)
    for key, field in keys.items():
        if key in table:
            item = table[key]
            for rule in field.rules:
                item = rule.read(key, item, defined)
            values[field.attribute] = item
        elif field.required:
            raise ConfigError(f"the key {key!r} is missing")
    return record(**values)
