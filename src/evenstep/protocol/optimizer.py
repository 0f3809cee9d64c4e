"""Describes an optimizer to the servers: its name, and the options of each param group."""

import math
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Final, TypeAlias

import numpy as np
from msgspec import Meta, Struct

from evenstep.core.errors import ConfigError
from evenstep.core.nearest import nearest

Finite: TypeAlias = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]

_MAX_GROUPS: Final = 100_000
_MAX_OPTIONS: Final = 32
_MAX_NUMBERS: Final = 8

Option: TypeAlias = bool | Finite | Annotated[tuple[Finite, ...], Meta(max_length=_MAX_NUMBERS)]
Options: TypeAlias = Annotated[Mapping[str, Option], Meta(max_length=_MAX_OPTIONS)]
"""The options of a param group, such as lr and betas."""

State: TypeAlias = Mapping[str, object]
"""A parameter's optimizer state, as in torch's `state_dict()["state"]`: tensors of its shape, and scalars."""


class OptimizerSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An optimizer's name and the options of each of its param groups."""

    name: str
    groups: Annotated[tuple[Options, ...], Meta(min_length=1, max_length=_MAX_GROUPS)]


_ADAM: Final[Mapping[str, Option]] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "amsgrad": False,
    "maximize": False,
}
_DEFAULTS: Final[Mapping[str, Mapping[str, Option]]] = MappingProxyType(
    {
        "SGD": {
            "lr": 1e-3,
            "momentum": 0.0,
            "dampening": 0.0,
            "weight_decay": 0.0,
            "nesterov": False,
            "maximize": False,
        },
        "Adam": _ADAM,
        "AdamW": {**_ADAM, "weight_decay": 0.01},
    }
)
"""The options of torch's optimizers, for workers that have no torch."""


def spec_of(name: str, options: Mapping[str, object]) -> OptimizerSpec:
    """Describe an optimizer with one param group of these options, and torch's defaults for the others.

    Optimizers other than SGD, Adam and AdamW are described by the given options alone.

    Raises:
        ConfigError: It has no such option, or the value is of another kind.
    """
    defaults = _DEFAULTS.get(name, {})
    for given in options:
        if defaults and given not in defaults:
            raise ConfigError(f"{name} has no option {given!r}: {nearest(given, list(defaults))}")
    group = {**defaults, **{key: plain_option(key, value) for key, value in options.items()}}
    return OptimizerSpec(name=name, groups=(group,))


def plain_option(name: str, value: object) -> Option:
    """Return an option as plain numbers; NumPy's numbers are accepted too.

    Raises:
        ConfigError: The value is of another kind, or not finite.
    """
    if isinstance(value, bool | np.bool_):
        return bool(value)
    several = isinstance(value, list | tuple)
    given = tuple(value) if isinstance(value, list | tuple) else (value,)
    numbers = tuple(_finite(each) for each in given)
    if None in numbers or len(numbers) > _MAX_NUMBERS:
        raise ConfigError(
            f"the servers do not support the option {name}={value!r}: use finite numbers, pairs of numbers or bools"
        )
    return numbers if several else numbers[0]  # type: ignore[return-value]


def _finite(value: object) -> float | None:
    """Return the value as a float; None if it is not a finite number."""
    if not isinstance(value, int | float | np.integer | np.floating):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
