"""The schemes by the names that people know, and the one parser of scheme strings.

A recipe is a few lines that put parts together. This is the only place where a name stands for an algorithm.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, final

from evenstep.core.errors import ConfigError
from evenstep.core.load.base import Load
from evenstep.core.load.equal import Equal
from evenstep.core.load.predicted import Predicted
from evenstep.core.load.static import Static
from evenstep.core.nearest import nearest


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """One answer to each question; so far *how much* (`load`), everyone with everyone, behind a barrier.

    `name` is the scheme string that makes the same scheme.
    """

    name: str
    load: Load

    def __str__(self) -> str:
        return self.name


def bsp() -> Scheme:
    """Bulk-synchronous training with equal batch sizes: what plain DistributedDataParallel does.

    When to use it: all workers are equally fast. When not: any of them is slower, since all run at its speed.
    """
    return Scheme(name="bsp", load=Equal())


def lb_bsp(
    *,
    predictor: str = "change",
    times: Literal["affine", "proportional"] = "affine",
    minimum: int | None = None,
    maximum: int | None = None,
    multiple: int = 1,
) -> Scheme:
    """LB-BSP: at every iteration each worker gets the batch size that lets all finish together.

    Source: Chen, Weng, Wang, Li, Li: arXiv 1806.02508; SoCC 2020; TCC 2021. The global batch stays constant and each
    gradient is weighted by x_i / X, so the mathematics is that of `bsp`. We differ in that there is no manager process
    (each worker predicts itself and all run the same allocation), in the default predictor (`change`, which needs no
    training), and in that the time model is fitted from the iterations themselves.

    When to use it: some workers are slower than others, for good or for tens of iterations. When not: slowness that is
    new in every iteration cannot be predicted; then it keeps equal sizes.

    Args:
        predictor: How a worker predicts its speed: `change`, `ema` or `last`.
        times: `proportional` (time through the origin, LB-BSP's model of CPU workers) or `affine` (a fixed part too).
        minimum: The smallest batch of a worker; by default 1, or 2 where the model has BatchNorm.
        maximum: The largest batch of a worker.
        multiple: Sizes are multiples of this, except in the last slice of an epoch.
    """
    arguments = {
        "predictor": predictor,
        "times": times,
        "minimum": minimum,
        "maximum": maximum,
        "multiple": multiple,
    }
    load = Predicted(predictor=predictor, times=times, minimum=minimum, maximum=maximum, multiple=multiple)
    return Scheme(name=_spelled("lb-bsp", lb_bsp, arguments), load=load)


def static(sizes: Sequence[int]) -> Scheme:
    """The user's own sizes, one per worker, with the right weights and no tuning; see `batch_sizes` of `prepare`."""
    return Scheme(name="static:" + "/".join(str(size) for size in sizes), load=Static(sizes=tuple(sizes)))


RECIPES: Mapping[str, Callable[..., Scheme]] = MappingProxyType({"bsp": bsp, "lb-bsp": lb_bsp})
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
            hint = nearest(key, parameters) if parameters else "it takes none"
            raise ConfigError(f"the scheme {name!r} has no parameter {key!r}: {hint}")
        if not equals or not value:
            raise ConfigError(f"the parameter {key!r} of {text!r} has no value: write {key}=...")
        if key in arguments:
            raise ConfigError(f"the parameter {key!r} stands twice in {text!r}: give it once")
        arguments[key] = _read(value, parameters[key], name)
    return recipe(**arguments)


def _read(value: str, parameter: inspect.Parameter, scheme: str) -> int | str:
    if parameter.annotation not in (int, int | None):
        return value
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"{parameter.name} of the scheme {scheme!r} takes a whole number, not {value!r}") from None


def _spelled(name: str, recipe: Callable[..., Scheme], arguments: Mapping[str, Any]) -> str:
    """The scheme string with the arguments that differ from the recipe's defaults."""
    defaults = {key: parameter.default for key, parameter in inspect.signature(recipe).parameters.items()}
    given = [f"{key}={value}" for key, value in arguments.items() if value != defaults[key]]
    return f"{name}:{','.join(given)}" if given else name
