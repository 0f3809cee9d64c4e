"""One table of a TOML file, read with the types that it should have.

The messages of its errors do not say where the table stands; `placed` adds that, once, around the reading of a table.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeVar, final

from evenstep.cluster.quantity import Quantity
from evenstep.core.errors import ConfigError
from evenstep.core.nearest import nearest
from evenstep.core.shown import shown

T = TypeVar("T")

_LARGEST: Final = 10**20
"""More than any whole number in a file can mean; those with a limit of their own are less."""


@contextmanager
def placed(place: str) -> Iterator[None]:
    """Put `place` in front of the message of a ConfigError that is raised inside."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The keys and values of one table.

    A key without a default must be there. Every method raises ConfigError for a value of another type.
    """

    entries: Mapping[str, object]

    @classmethod
    def of(cls, value: object) -> "Table":
        """The value of a key that should be a table."""
        if not isinstance(value, dict):
            raise ConfigError(f"this must be a table, not {shown(value)}")
        return cls(entries=value)

    def only(self, keys: Iterable[str]) -> None:
        """Refuse every key that is not one of `keys`."""
        valid = list(keys)
        for key in self.entries:
            if key not in valid:
                raise ConfigError(f"there is no key {shown(key)} here; {nearest(key, valid)}")

    def value(self, key: str, default: object = None) -> object:
        """The value as it stands; TOML has no null, so no value is None."""
        value = self.entries.get(key, default)
        if value is None:
            raise ConfigError(f"the key {key!r} is missing")
        return value

    def integer(self, key: str, default: int | None = None, *, least: int = 0) -> int:
        """A whole number of at least `least`."""
        return as_integer(key, self.value(key, default), least=least)

    def number(self, key: str, default: float | None = None) -> float:
        """A number, whole or not."""
        return as_number(key, self.value(key, default))

    def quantity(self, key: str, kind: Quantity, default: float | None = None) -> float:
        """A number with a unit, in the base unit of its kind, as the default is."""
        if default is not None and key not in self.entries:
            return default
        return as_quantity(key, self.value(key), kind)

    def name(self, key: str, valid: Iterable[str]) -> str:
        """One of the `valid` names."""
        return as_name(key, self.value(key), valid)

    def items(self, key: str, default: tuple[object, ...] | None = None) -> tuple[object, ...]:
        """A list, with items of any type."""
        value = self.value(key, default)
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{key} must be a list in square brackets, not {shown(value)}")
        return tuple(value)

    def each(self, key: str, read: Callable[[str, "Table"], T]) -> dict[str, T]:
        """What `read` makes of the name and the table of each [key.NAME]; empty where there are none."""
        with placed(f"[{key}]"):
            tables = Table.of(self.value(key, {})).entries
        values = {}
        for name, entries in tables.items():
            with placed(f"[{key}.{name}]"):
                values[name] = read(name, Table.of(entries))
        return values


def as_integer(key: str, value: object, *, least: int) -> int:
    """`value`, where it is a whole number of at least `least`; ConfigError otherwise."""
    # true is a Python int too.
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{key} must be a whole number of at least {least}, not {shown(value)}")
    if value > _LARGEST:
        raise ConfigError(f"{key} must be a whole number of at most {_LARGEST}, not {shown(value)}")
    return value


def as_number(key: str, value: object) -> float:
    """`value`, where it is a number; ConfigError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{key} must be a number, not {shown(value)}")
    if isinstance(value, int) and value > _LARGEST:
        raise ConfigError(f"{key} must be a number of at most {_LARGEST}, not {shown(value)}")
    return value


def as_quantity(key: str, value: object, kind: Quantity) -> float:
    """`value`, where it is a number with a unit of this kind, in its base unit; ConfigError otherwise."""
    try:
        return kind.parse(value)
    except ConfigError as error:
        raise ConfigError(f"{key} {error}") from None


def as_name(key: str, value: object, valid: Iterable[str]) -> str:
    """`value`, where it is one of the `valid` names; ConfigError otherwise."""
    names = list(valid)
    if not isinstance(value, str):
        raise ConfigError(f"{key} must be a name in quotes, not {shown(value)}")
    if value not in names:
        raise ConfigError(f"{key} {shown(value)} is unknown; {nearest(value, names)}")
    return value
