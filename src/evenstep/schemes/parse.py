"""The recipes by the names that people know, and the one parser of scheme strings.

This is the only place where a name stands for an algorithm. A new scheme is a recipe in a file of its own, and a row of
`RECIPES`.
"""

import inspect
import re
from typing import Any, Final

from evenstep.core.errors import ConfigError
from evenstep.core.nearest import nearest
from evenstep.core.shown import shown
from evenstep.schemes.recipe import RECIPES, read
from evenstep.schemes.scheme import Scheme

DEFAULT = "lb-bsp"

_OTHER_SIGN: Final = re.compile(r"(?P<name>[A-Za-z_-]+)\s*[,;\s]\s*(?P<rest>[a-z_]+\s*=.{0,100})")


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
        raise ConfigError(f"there is no scheme {shown(name)}: {_meant(text) or nearest(name, RECIPES)}")
    recipe = RECIPES[name]
    parameters = inspect.signature(recipe).parameters
    arguments: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key not in parameters:
            raise ConfigError(f"the scheme {name!r} has no parameter {shown(key)}: {nearest(key, parameters)}")
        if not equals or not value:
            raise ConfigError(f"the parameter {key!r} of {shown(text)} has no value: write {key}=...")
        if key in arguments:
            raise ConfigError(f"the parameter {key!r} stands twice in {shown(text)}: give it once")
        arguments[key] = read(value, parameters[key], name)
    return recipe(**arguments)


def _meant(text: str) -> str | None:
    """What was meant by a name with another sign than a colon behind it; None where that is not so."""
    match = _OTHER_SIGN.fullmatch(text.strip())
    if match is None or match["name"].lower().replace("_", "-") not in RECIPES:
        return None
    return f"did you mean '{match['name']}:{match['rest']}'?"
