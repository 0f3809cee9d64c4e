"""How schemes are spelled, and how one scheme lends its sizes to another.

A scheme's name is the string that makes it: its recipe's, and the parameters that are not the defaults. Commas stand
between parameters, so those of a scheme within a scheme have semicolons between them.
"""

import inspect
from collections.abc import Callable, Mapping

from evenstep.core.errors import ConfigError
from evenstep.schemes.parse import parse_scheme
from evenstep.schemes.scheme import Scheme


def spelled(name: str, recipe: Callable[..., Scheme], arguments: Mapping[str, object]) -> str:
    """The scheme string with the arguments that differ from the recipe's defaults."""
    defaults = {key: parameter.default for key, parameter in inspect.signature(recipe).parameters.items()}
    texts = {key: _text(value) for key, value in arguments.items() if value is not None}
    given = [f"{key}={text}" for key, text in texts.items() if text != _text(defaults[key])]
    return f"{name}:{','.join(given)}" if given else name


def sizes_of(recipe: str, load: Scheme | str) -> Scheme:
    """The scheme that is given to another for its sizes alone.

    Raises:
        ConfigError: It says more than how much each worker computes, or no string makes it.
    """
    sizes = parse_scheme(load.replace(";", ",")) if isinstance(load, str) else load
    if sizes != Scheme(name=sizes.name, load=sizes.load, compare=sizes.compare):
        raise ConfigError(
            f"{recipe} takes only the sizes of {sizes.name!r}: leave out what it says beside them (weighting,"
            " exchange, micro_batch, period, servers)"
        )
    try:
        named = parse_scheme(sizes.name)
    except ConfigError:
        named = None
    if named != sizes:
        raise ConfigError(
            f"{recipe} passes sizes on by name, and {sizes.name!r} is no name that makes these: give a scheme that a"
            " recipe made"
        )
    return sizes


def _text(value: object) -> str:
    if isinstance(value, Scheme):
        return value.name.replace(",", ";")
    if isinstance(value, bool):
        return str(value).lower()
    # 2 and 2.0 are the same number, and so have the same name.
    return str(value).removesuffix(".0")
