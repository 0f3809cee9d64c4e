"""The recipes by the names that people know, and the one parser of scheme strings.

This is the only place where a name stands for an algorithm. A new scheme is a recipe in a file of its own, and a row of
`RECIPES`.
"""

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from evenstep.core.errors import ConfigError
from evenstep.core.nearest import nearest
from evenstep.schemes.collective import bsp, dbs, lb_bsp, local_sgd
from evenstep.schemes.grouped import grouped
from evenstep.schemes.scheme import Scheme
from evenstep.schemes.served import asp, dssp, ssp

RECIPES: Mapping[str, Callable[..., Scheme]] = MappingProxyType(
    {
        "bsp": bsp,
        "lb-bsp": lb_bsp,
        "dbs": dbs,
        "local-sgd": local_sgd,
        "asp": asp,
        "ssp": ssp,
        "dssp": dssp,
        "grouped": grouped,
    }
)
"""The recipes that a scheme string can name."""

DEFAULT = "lb-bsp"


def parse_scheme(text: str) -> Scheme:
    """The scheme that a string such as `lb-bsp:predictor=ema,multiple=8` stands for.

    Raises:
        ConfigError: The name or a parameter is unknown (the message names the nearest), or a value cannot be read.

    >>> parse_scheme("lb-bsp:multiple=8").name
    'lb-bsp:multiple=8'
    >>> parse_scheme("lbbsp")
    Traceback (most recent call last):
    evenstep.core.errors.ConfigError: there is no scheme 'lbbsp': did you mean 'lb-bsp'?
    """
    name, _, rest = text.strip().partition(":")
    name = name.strip().lower().replace("_", "-")
    if name not in RECIPES:
        raise ConfigError(f"there is no scheme {name!r}: {nearest(name, RECIPES)}")
    recipe = RECIPES[name]
    parameters = inspect.signature(recipe).parameters
    arguments: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key not in parameters:
            raise ConfigError(f"the scheme {name!r} has no parameter {key!r}: {nearest(key, parameters)}")
        if not equals or not value:
            raise ConfigError(f"the parameter {key!r} of {text!r} has no value: write {key}=...")
        if key in arguments:
            raise ConfigError(f"the parameter {key!r} stands twice in {text!r}: give it once")
        arguments[key] = _read(value, parameters[key], name)
    return recipe(**arguments)


def _read(value: str, parameter: inspect.Parameter, scheme: str) -> bool | float | str:
    kind = parameter.annotation
    if kind is bool:
        if value.lower() not in ("true", "false"):
            raise ConfigError(f"{parameter.name} of the scheme {scheme!r} is true or false, not {value!r}")
        return value.lower() == "true"
    if kind not in _NUMBERS:
        return value
    try:
        return _NUMBERS[kind](value)
    except ValueError:
        what = "a whole number" if _NUMBERS[kind] is int else "a number"
        raise ConfigError(f"{parameter.name} of the scheme {scheme!r} takes {what}, not {value!r}") from None


_NUMBERS: Mapping[object, Callable[[str], float]] = MappingProxyType(
    {int: int, int | None: int, float: float, float | None: float}
)
