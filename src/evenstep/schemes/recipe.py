"""The registry of recipes, and the types of their arguments: checked in Python, and read from scheme strings."""

import functools
import inspect
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, Final, Literal, ParamSpec, cast, get_args, get_origin

import numpy as np

from evenstep.core.errors import ConfigError
from evenstep.core.shown import shown
from evenstep.core.values import UNLIMITED
from evenstep.schemes.scheme import Scheme

P = ParamSpec("P")

_WORDS: Final = {bool: "true or false", int: "a whole number", float: "a number", Scheme: "a scheme", str: "a name"}

_recipes: Final[dict[str, Callable[..., Scheme]]] = {}
RECIPES: Final = MappingProxyType(_recipes)
"""The recipes that a scheme string can name, in the order in which their modules are imported."""

_BOOLEANS: Final = {"true": True, "false": False}


def recipe(function: Callable[P, Scheme]) -> Callable[P, Scheme]:
    """Register a recipe under its name; it then refuses arguments of other types than its annotations say.

    Raises:
        ConfigError: By the recipe, which names the parameter.
    """
    parameters = inspect.signature(function).parameters
    name = function.__name__.replace("_", "-")

    @functools.wraps(function)
    def checked(*positional: P.args, **named: P.kwargs) -> Scheme:
        values = {
            key: require_type(value, parameters[key], name) if key in parameters else value
            for key, value in named.items()
        }
        return cast("Callable[..., Scheme]", function)(*positional, **values)

    _recipes[name] = checked
    return checked


def require_type(value: object, parameter: inspect.Parameter, scheme: str) -> Any:  # noqa: ANN401 - as the annotation
    """The value, where it is what the annotation of this parameter of a scheme says; NumPy's integers become Python's.

    Raises:
        ConfigError: It is not, or is a whole number beyond any that can be meant.
    """
    types = _types_of(parameter)
    if type(value) is int or isinstance(value, np.integer):
        if {int, float} & types and abs(int(value)) <= UNLIMITED:
            return int(value)
    elif type(value) in types or isinstance(value, tuple(types - {int, bool})):
        return value
    raise ConfigError(_refusal(value, parameter, scheme))


def read(text: str, parameter: inspect.Parameter, scheme: str) -> Any:  # noqa: ANN401 - as the annotation
    """The value of a parameter of a scheme that a scheme string says.

    Raises:
        ConfigError: It is of another type than the annotation says.
    """
    types = _types_of(parameter)
    if str in types:
        return text
    try:
        value = _BOOLEANS[text.lower()] if bool in types else int(text) if int in types else float(text)
    except (KeyError, ValueError):
        raise ConfigError(_refusal(text, parameter, scheme)) from None
    return require_type(value, parameter, scheme)


def _refusal(value: object, parameter: inspect.Parameter, scheme: str) -> str:
    types = _types_of(parameter)
    words = " or ".join(word for each, word in _WORDS.items() if each in types)
    if type(value) is int and int in types:
        words = f"a whole number of at most {UNLIMITED}"
    verb = "is" if bool in types else "takes"
    return f"{parameter.name} of the scheme {scheme!r} {verb} {words}, not {shown(value)}"


def _types_of(parameter: inspect.Parameter) -> set[type]:
    """What an annotation allows; one of a few words is a text, and the recipe says which."""
    kind = parameter.annotation
    kinds = [kind] if isinstance(kind, type) or get_origin(kind) is Literal else get_args(kind)
    return {str if get_origin(each) is Literal else each for each in kinds}
