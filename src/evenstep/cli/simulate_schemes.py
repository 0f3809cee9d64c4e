"""Several schemes in one text, and one scheme with many values of a parameter."""

import inspect
import re
from typing import Final

from evenstep.core.errors import ConfigError
from evenstep.core.nearest import nearest
from evenstep.schemes import RECIPES, bsp, recipe_named

_RANGE: Final = re.compile(r"([0-9]+):([0-9]+)(?::([0-9]+))?")
_MAX_STEPS: Final = 1000
_ON_SERVERS: Final = re.compile(r"engine\s*=\s*server")
_OF_SERVERS: Final = {"servers", "clip", "load"}
"""The parameters that `bsp` takes on servers only."""


def split_schemes(text: str) -> list[str]:
    """Return the schemes in a text with commas between them and within them.

    Text after a comma belongs to the scheme before it if it is a parameter, which has an equals sign.

    >>> split_schemes("bsp,dssp:lower=3,upper=15,asp:load=lb-bsp:predictor=ema;minimum=4")
    ['bsp', 'dssp:lower=3,upper=15', 'asp:load=lb-bsp:predictor=ema;minimum=4']
    """
    schemes: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if schemes and "=" in part.partition(":")[0]:
            schemes[-1] += f",{part}"
        else:
            schemes.append(part)
    return schemes


def swept(schemes: list[str], sweep: str) -> list[str]:
    """Return each scheme that has the parameter of the sweep, once with each value; the others as they are.

    Raises:
        ConfigError: The sweep is malformed, or no scheme has its parameter.

    >>> swept(["bsp", "ssp"], "bound=1:3")
    ['bsp', 'ssp:bound=1', 'ssp:bound=2', 'ssp:bound=3']
    """
    name, _, values = (piece.strip() for piece in sweep.partition("="))
    if not name or not values:
        raise ConfigError(f"--sweep needs a parameter and its values, such as bound=1:16, not {sweep!r}")
    given = _values(values, sweep)
    known = [_parameters(scheme) for scheme in schemes]
    if not any(name in parameters for parameters in known):
        hint = nearest(name, sorted(set().union(*known)))
        raise ConfigError(f"--sweep {sweep}: none of the schemes has a parameter {name!r}: {hint}")
    result: list[str] = []
    for scheme, parameters in zip(schemes, known, strict=True):
        joint = "," if "=" in scheme else ":"
        result += [f"{scheme}{joint}{name}={value}" for value in given] if name in parameters else [scheme]
    return result


def _values(text: str, sweep: str) -> list[str]:
    match = _RANGE.fullmatch(text)
    if match is None:
        return text.split("/")
    first, last, step = int(match[1]), int(match[2]), int(match[3] or 1)
    if last < first or step < 1 or (last - first) // step >= _MAX_STEPS:
        raise ConfigError(f"--sweep {sweep} must go up, in steps of at least 1 and at most {_MAX_STEPS} of them")
    return [str(value) for value in range(first, last + 1, step)]


def _parameters(scheme: str) -> set[str]:
    """Return the parameters of the recipe of a scheme; none if there is no such recipe, which is refused elsewhere."""
    try:
        name, given = recipe_named(scheme)
    except ConfigError:
        return set()
    recipe = RECIPES[name]
    parameters = set(inspect.signature(recipe).parameters)
    return parameters - _OF_SERVERS if recipe is bsp and not _ON_SERVERS.search(given) else parameters
