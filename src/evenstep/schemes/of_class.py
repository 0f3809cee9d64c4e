"""Recipes made from classes: a policy or an expert states its parameters once, in the signature of its constructor."""

import inspect
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar, Unpack, cast, final, get_type_hints

from evenstep.core.errors import ConfigError
from evenstep.core.load import Averages, Even, Expert, Experts, LoadOf, LoadPolicy
from evenstep.core.sync import SyncPolicy
from evenstep.schemes.collective import Maximum, Minimum, Multiple
from evenstep.schemes.recipe import RECIPES, name_of, recipe, sizes_of
from evenstep.schemes.scheme import Scheme, Served, ServerOptions
from evenstep.schemes.served import Sizes

C = TypeVar("C", bound=type)

_KEYWORD: Final = inspect.Parameter.KEYWORD_ONLY


@final
@dataclass(frozen=True, slots=True)
class Maker:
    """Makes objects of a user's class with these parameters for a number of workers. Compares equal by its results."""

    kind: type
    given: tuple[tuple[str, object], ...]

    def __call__(self, workers: int) -> Any:  # noqa: ANN401 - of the kind
        return self.kind(workers, **dict(self.given))


@final
@dataclass(frozen=True, kw_only=True)
class SyncOf:
    """Leads decided by a user's sync policy; workers claim samples one by one, not a slice together."""

    make: Maker
    in_step: bool = field(init=False, default=False)

    def policy(self, workers: int) -> SyncPolicy:
        return cast("SyncPolicy", self.make(workers))


def recipe_of(kind: C) -> C:
    """Register the recipe of a class of policies or experts, under the class's name in lower case with dashes.

    The run gives the constructor its first parameter, `workers`. The others are the recipe's parameters: each has a
    default and a type as in `recipe`, perhaps `Annotated` with a line of help. A dataclass is the shortest such class.
    A `LoadPolicy` also gets `minimum`, `maximum` and `multiple`; so does an `Expert`, which is used with the experts of
    `lb-bsp`; a `SyncPolicy` gets `load` and the options of servers.

    Raises:
        ConfigError: The class is not of this form.
    """
    decides_leads = SyncPolicy in kind.__mro__
    if not decides_leads and not issubclass(kind, LoadPolicy | Expert):
        raise ConfigError(
            f"the class {kind.__name__} cannot be a recipe: derive it from LoadPolicy, SyncPolicy or Expert of"
            " evenstep.policies"
        )
    make = _served if decides_leads else _sized
    first, *own = inspect.signature(kind).parameters.values()
    if first.name != "workers":
        raise ConfigError(f"the constructor of {kind.__name__} begins with {first.name!r}: begin with workers")
    common = [*inspect.signature(make).parameters.values()][1:]
    if twice := sorted({each.name for each in own} & {*ServerOptions.__annotations__, *(each.name for each in common)}):
        raise ConfigError(f"every recipe of a class like {kind.__name__} has {', '.join(twice)}: name yours otherwise")

    def made(**values: Any) -> Scheme:  # noqa: ANN401 - checked by the recipe
        maker = Maker(kind, tuple((each.name, values.pop(each.name, each.default)) for each in own))
        maker(1)  # Lets the class itself check its parameters.
        return make(maker, **values)

    made.__name__, made.__module__, made.__doc__ = kind.__name__, kind.__module__, kind.__doc__
    made.__annotations__ = {**make.__annotations__, **get_type_hints(kind.__init__, include_extras=True)}  # type: ignore[misc]
    made.__signature__ = inspect.Signature([*(each.replace(kind=_KEYWORD) for each in own), *common])  # type: ignore[attr-defined]
    recipe(made)
    return kind


def scheme_of(kind: type, **parameters: object) -> Scheme:
    """The scheme of a class that has a recipe.

    Raises:
        ConfigError: The class has no recipe, or a parameter is wrong.
    """
    if name_of(kind) not in RECIPES:
        raise ConfigError(f"the class {kind.__name__} has no recipe: put @evenstep.policies.recipe before it")
    return RECIPES[name_of(kind)](**parameters)


def _sized(maker: Maker, *, minimum: Minimum = None, maximum: Maximum = None, multiple: Multiple = 1) -> Scheme:
    if issubclass(maker.kind, Expert):
        experts = (Averages, Even, maker)
        return Scheme(load=Experts(experts=experts, minimum=minimum, maximum=maximum, multiple=multiple))
    return Scheme(load=LoadOf(make=maker, minimum=minimum, maximum=maximum, multiple=multiple))


def _served(maker: Maker, *, load: Sizes = "bsp", **served: Unpack[ServerOptions]) -> Scheme:
    return Scheme(load=sizes_of(name_of(maker.kind), load).load, sync=SyncOf(make=maker), served=Served(**served))
