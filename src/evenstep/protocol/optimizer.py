"""How an optimizer is described to the servers: by its name and the options of each of its param groups."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self, TypeAlias, cast, final

from evenstep.core.errors import ConfigError

Option: TypeAlias = bool | float | tuple[float, ...]
Options: TypeAlias = Mapping[str, Option]
"""What an update depends on beside weights, gradient and state: lr, betas, ..."""

State: TypeAlias = Mapping[str, object]
"""A parameter's optimizer state, as in torch's `state_dict()["state"]`: tensors of its shape, and scalars."""

_MAX_GROUPS: Final = 100_000
_MAX_OPTIONS: Final = 32
_MAX_NUMBERS: Final = 8


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """An optimizer's name and the options of each of its param groups."""

    name: str
    groups: tuple[Options, ...]

    def to_record(self) -> dict[str, object]:
        """Plain values for the wire and for snapshots."""
        return {"name": self.name, "groups": options_to_record(self.groups)}

    @classmethod
    def from_record(cls, record: object) -> Self:
        """What `to_record` gave, from a peer that may send anything.

        Raises:
            ConfigError: It is nothing of the kind.
        """
        fields = cast("Mapping[object, object]", record) if isinstance(record, Mapping) else {}
        name = fields.get("name")
        if not isinstance(name, str):
            raise ConfigError("an optimizer is sent by name: send one")
        return cls(name=name, groups=options_from_record(fields.get("groups")))


def options_to_record(options: Sequence[Options]) -> list[dict[str, object]]:
    """Options per group as plain values."""
    return [
        {name: list(value) if isinstance(value, tuple) else value for name, value in group.items()} for group in options
    ]


def options_from_record(record: object) -> tuple[Options, ...]:
    """What `options_to_record` gave, from a peer that may send anything.

    Raises:
        ConfigError: It is nothing of the kind.
    """
    if not isinstance(record, Sequence) or isinstance(record, str | bytes) or not 0 < len(record) <= _MAX_GROUPS:
        raise ConfigError(f"an optimizer has options for 1 to {_MAX_GROUPS} groups: send these")
    return tuple(_received(group) for group in record)


def plain_option(name: str, value: object) -> Option:
    """An option as plain numbers.

    Raises:
        ConfigError: It is something else.
    """
    if isinstance(value, list | tuple) and len(value) <= _MAX_NUMBERS:
        return tuple(float(number) for number in value)
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return float(value)
    raise ConfigError(f"a server cannot be told the option {name}={value!r}: use numbers, pairs of them or bools")


def _received(group: object) -> Options:
    if not isinstance(group, Mapping) or len(group) > _MAX_OPTIONS:
        raise ConfigError(f"a group has at most {_MAX_OPTIONS} options by name: send these")
    options: dict[str, Option] = {}
    for name, value in group.items():
        numbers = value if isinstance(value, list | tuple) and len(value) <= _MAX_NUMBERS else [value]
        if not isinstance(name, str) or not all(_finite(number) for number in numbers):
            raise ConfigError(f"the option {str(name)[:200]!r} is no finite number, bool or pair: send it as one")
        options[name] = plain_option(name, value)
    return options


def _finite(number: object) -> bool:
    try:
        return isinstance(number, int | float) and math.isfinite(number)
    except OverflowError:
        return False
