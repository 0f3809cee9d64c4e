"""Several schemes in one text, and one scheme with many values of a parameter."""

import inspect
import re
from typing import Final

from evenstep.core.errors import ConfigError
from evenstep.core.nearest import nearest
from evenstep.schemes import RECIPES, bsp

_RANGE: Final = re.compile(r"([0-9]+):([0-9]+)(?::([0-9]+))?")
_MOST: Final = 1000
_ON_SERVERS: Final = re.compile(r"engine\s*=\s*server")
_OF_SERVERS: Final = {"servers", "clip", "load"}
"""What `bsp` takes on servers alone."""


def split_schemes(text: str) -> list[str]:
    """The schemes in a text with commas between them and within them.

    What follows a comma belongs to the scheme before it where it is a parameter, which has an equals sign.

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
    """Each scheme that has the parameter of the sweep once with each value of it; the others as they are.

    Raises:
        ConfigError: The sweep is malformed, or no scheme has its parameter.

    >>> swept(["bsp", "ssp"], "bound=1:3")
    ['bsp', 'ssp:bound=1', 'ssp:bound=2', 'ssp:bound=3']
    """
    name, _, values = (piece.strip() for piece in sweep.partition("="))
    if not name or not values:
        raise ConfigError(f"--sweep needs a parameter and its values, such as bound=1:16, not {sweep!r}")
    texts = [f"{name}={value}" for value in _values(values, sweep)]
    result: list[str] = []
    known: set[str] = set()
    found = False
    for scheme in schemes:
        parameters = _parameters(scheme)
        known |= parameters
        if name not in parameters:
            result.append(scheme)
            continue
        found = True
        joint = "," if ":" in scheme else ":"
        result += [f"{scheme}{joint}{text}" for text in texts]
    if not found:
        raise ConfigError(
            f"--sweep {sweep}: none of the schemes has a parameter {name!r}: {nearest(name, sorted(known))}"
        )
    return result


def _values(text: str, sweep: str) -> list[str]:
    match = _RANGE.fullmatch(text)
    if match is None:
        return text.split("/")
    first, last, step = int(match[1]), int(match[2]), int(match[3] or 1)
    if last < first or step < 1 or (last - first) // step >= _MOST:
        raise ConfigError(f"--sweep {sweep} must go up, in steps of at least 1 and at most {_MOST} of them")
    return [str(value) for value in range(first, last + 1, step)]


def _parameters(scheme: str) -> set[str]:
    """What the recipe of a scheme takes; nothing where there is no such recipe, which is refused elsewhere."""
    name, _, given = scheme.partition(":")
    recipe = RECIPES.get(name.strip().lower().replace("_", "-"))
    if recipe is None:
        return set()
    parameters = set(inspect.signature(recipe).parameters)
    return parameters - _OF_SERVERS if recipe is bsp and not _ON_SERVERS.search(given) else parameters
