"""Recipes (functions that make schemes, registered by a decorator) and the one parser of scheme strings.

This is the only place where a name stands for an algorithm. A recipe states each parameter once, in its signature. From
there the decorator takes its type, its default, its line in the docstring, its spelling in scheme strings, and the
scheme's name: the string that makes the same scheme, without parameters that have their defaults. Commas separate
parameters, and semicolons those of a scheme within a scheme. A list that is the only parameter of its recipe is written
without its name: `static:12/9/3`.
"""

import functools
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Any, Final, Literal, ParamSpec, Union, cast, get_args, get_origin, get_type_hints

import numpy as np

from evenstep.core.errors import ConfigError
from evenstep.core.nearest import nearest
from evenstep.core.shown import first_line, shown
from evenstep.core.values import UNLIMITED
from evenstep.schemes.given_sizes import read_sizes, text_of
from evenstep.schemes.scheme import LOCAL_STEPS, Scheme, Served, one_of

P = ParamSpec("P")

DEFAULT = "lb-bsp"
"""The scheme where none is given."""

_WORDS: Final = {
    bool: "true or false", int: "a whole number", float: "a number", Scheme: "a scheme", str: "a name",
    Sequence: "batch sizes such as 12/9/3",
}  # fmt: skip
_OTHER_SIGN: Final = re.compile(r"(?P<name>[A-Za-z_-]+)\s*[,;\s]\s*(?P<rest>[a-z_]+\s*=.{0,100})")

_WITHIN_NAMES: Final = re.compile(r"_|(?<=[a-z0-9])(?=[A-Z])")

_recipes: Final[dict[str, Callable[..., Scheme]]] = {}
RECIPES: Final = MappingProxyType(_recipes)
"""The recipes that scheme strings can name, in order of registration: evenstep's, then `MODULE:RECIPE`."""


def recipe(function: Callable[P, Scheme]) -> Callable[P, Scheme]:
    """Register a recipe, so that scheme strings can name it.

    Its name is the function's, with dashes; `evenstep.schemes.ssp(bound=2)` is `ssp:bound=2`. A recipe outside evenstep
    is preceded by its module: `my_module:my-recipe:window=3`. Every parameter has a default and is annotated with
    `int`, `float`, `bool`, `str`, a `Literal` of strings, `Scheme`, a union of these or with None, or `Annotated` of
    one with a line of help. `**served: Unpack[ServerOptions]` stands for the options of all parameter servers. The
    recipe returns a `Scheme`, to which the decorator gives its name.

    Raises:
        ConfigError: Raised by the recipe if an argument's type does not match its annotation.
    """
    signature, name = _signature(function), name_of(function)

    @functools.wraps(function)
    def checked(*positional: P.args, **named: P.kwargs) -> Scheme:
        given = signature.bind(*positional, **named).arguments
        values = {key: require_type(value, signature.parameters[key], name) for key, value in given.items()}
        made: object = cast("Callable[..., Scheme]", function)(**values)
        if not isinstance(made, Scheme):
            raise ConfigError(f"the recipe {name!r} gave {shown(made)}: return an evenstep.Scheme from it")
        return replace(made, name=_spelled(name, signature, values))

    checked.__signature__ = signature  # type: ignore[attr-defined]
    checked.__doc__ = _documented(function.__doc__ or "", _signature(function, with_help=True))
    _recipes[name] = checked
    return checked


def name_of(made: Callable[..., object]) -> str:
    """The name of this function's or class's recipe."""
    name, module = _canonical(made.__name__), made.__module__
    return name if module.startswith("evenstep.") else f"{module}:{name}"


def parse_scheme(text: Scheme | str, *, imports: bool = True) -> Scheme:
    """Parse a scheme string such as `lb-bsp:predictor=ema,multiple=8` or `my_module:my-recipe:window=3`.

    Args:
        text: The scheme string; a scheme is returned as it is.
        imports: Whether to import the module that it names. If not, only already registered recipes are known: a string
            from a peer must not import anything.

    Raises:
        ConfigError: The name or a parameter is unknown (the message names the nearest), a value cannot be read, or the
            module cannot be imported.

    >>> parse_scheme("lb-bsp:multiple=8").name
    'lb-bsp:multiple=8'
    >>> parse_scheme("lbbsp")
    Traceback (most recent call last):
    evenstep.core.errors.ConfigError: there is no scheme 'lbbsp': did you mean 'lb-bsp'?
    """
    if isinstance(text, Scheme):
        return text
    if not isinstance(text, str):
        raise ConfigError(
            "a scheme must be a string such as 'lb-bsp', or what a recipe such as evenstep.schemes.lb_bsp() returns,"
            f" not {shown(text)}"
        )
    name, rest = recipe_named(text, imports=imports)
    recipe = RECIPES[name]
    parameters = inspect.signature(recipe).parameters
    arguments: dict[str, Any] = {}
    alone = _list_of(parameters)
    parts = rest.split(",") if alone is None else [rest and f"{alone}={rest}"]
    for part in filter(None, (part.strip() for part in parts)):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key not in parameters:
            raise ConfigError(f"the scheme {name!r} has no parameter {shown(key)}: {nearest(key, parameters)}")
        if not equals or not value:
            raise ConfigError(f"the parameter {key!r} of {shown(text)} has no value: write {key}=...")
        if key in arguments:
            raise ConfigError(f"the parameter {key!r} stands twice in {shown(text)}: give it once")
        arguments[key] = _read(value, _types_of(parameters[key]))
    return recipe(**arguments)


def recipe_named(text: str, *, imports: bool = True) -> tuple[str, str]:
    """Split a scheme string into its key of `RECIPES` and the parameters after it; errors as in `parse_scheme`."""
    first, _, rest = (piece.strip() for piece in text.partition(":"))
    name = _canonical(first)
    if name in RECIPES:
        return name, rest
    second, _, parameters = (piece.strip() for piece in rest.partition(":"))
    if not second or "=" in second:
        raise ConfigError(f"there is no scheme {shown(first)}: {_meant(text) or nearest(name, RECIPES)}")
    name = f"{first}:{_canonical(second)}"
    if name not in RECIPES and imports:
        import_recipes(first)
    if name not in RECIPES:
        known = [each.partition(":")[2] for each in RECIPES if each.startswith(f"{first}:")]
        none = "put @evenstep.policies.recipe before a class or a function in it"
        then = nearest(_canonical(second), known) if known else none
        raise ConfigError(f"the module {shown(first)} has no recipe {shown(second)}: {then}")
    return name, parameters


def scheme_within(value: Scheme | str) -> Scheme:
    """Parse a scheme that is the value of another's parameter; semicolons may separate its own parameters."""
    return parse_scheme(value.replace(";", ",")) if isinstance(value, str) else value


def sizes_of(recipe: str, load: Scheme | str) -> Scheme:
    """The scheme whose sizes another scheme uses.

    Raises:
        ConfigError: The scheme says more than how much each worker computes, or no string makes it.
    """
    sizes = scheme_within(load)
    bare = Scheme(name=sizes.name, load=sizes.load, nonfinite=sizes.nonfinite)
    if sizes != bare or "nonfinite" in sizes.name:
        raise ConfigError(
            f"{recipe} takes only the sizes of {sizes.name!r}: leave out what it says besides them (weighting,"
            " exchange, micro_batch, period, nonfinite, servers)"
        )
    try:
        named = parse_scheme(sizes.name)
    except ConfigError:
        named = None
    if named != sizes:
        raise ConfigError(
            f"{recipe} passes sizes on by name, and {sizes.name!r} is not a name that makes these: give a scheme that a"
            " recipe made"
        )
    return sizes


def import_recipes(module: str, folder: str | None = None) -> None:
    """Import a user's module to register its recipes, also from the given or the present folder.

    Raises:
        ConfigError: It cannot be imported.
    """
    folder = os.getcwd() if folder is None else folder
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        import_module(module)
    except Exception as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        raise ConfigError(
            f"the module {shown(module)} of a scheme cannot be imported ({why}): check its name and that it is in"
            f" {folder} or on PYTHONPATH"
        ) from error


def recipe_modules(allow: Collection[str] = ()) -> list[tuple[str, str]]:
    """The users' modules with recipes registered in this process, and the folders to import them from.

    Includes the modules of the optimizers, `module:Class`, that servers may run; these are imported.

    Raises:
        ConfigError: A module cannot be imported.
    """
    for name in allow:
        import_recipes(name.partition(":")[0])
    found = {name.partition(":")[0] for name in (*RECIPES, *allow) if ":" in name} - {"__main__"}
    modules = [(name, Path(str(sys.modules[name].__file__)).resolve()) for name in sorted(found)]
    return [(name, str(file.parents[name.count(".") + (file.stem == "__init__")])) for name, file in modules]


def require_type(value: object, parameter: inspect.Parameter, scheme: str) -> Any:  # noqa: ANN401 - as the annotation
    """Return the value if it matches the annotation of this scheme's parameter; NumPy's integers become Python's.

    Raises:
        ConfigError: It does not, is none of the words of a `Literal`, or is an implausibly large whole number.
    """
    types = _types_of(parameter)
    if Sequence in types:
        with suppress(TypeError):
            return read_sizes(value)
    elif type(value) is int or isinstance(value, np.integer):
        if {int, float} & types and abs(int(value)) <= UNLIMITED:
            return int(value)
    elif type(value) in types or isinstance(value, tuple(types - {int, bool})):
        if get_origin(parameter.annotation) is Literal:
            one_of(parameter.name, cast("str", value), get_args(parameter.annotation))
        return value
    raise ConfigError(_refusal(value, parameter, scheme))


def _canonical(name: str) -> str:
    """`ByLastTime` and `by_last_time` are `by-last-time`."""
    return _WITHIN_NAMES.sub("-", name).lower()


def _meant(text: str) -> str | None:
    """The likely meaning of a name that is followed by a sign other than a colon; None if it is not."""
    match = _OTHER_SIGN.fullmatch(text.strip())
    if match is None or _canonical(match["name"]) not in RECIPES:
        return None
    return f"did you mean '{match['name']}:{match['rest']}'?"


def _signature(function: Callable[..., object], *, with_help: bool = False) -> inspect.Signature:
    """The function's signature with all annotations resolved and server options as separate parameters."""
    hints = get_type_hints(function, include_extras=with_help)
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            options, only = get_type_hints(get_args(hints[name])[0], include_extras=with_help), parameter.KEYWORD_ONLY
            for key, kind in options.items():
                default = LOCAL_STEPS[key] if key in LOCAL_STEPS else getattr(Served(), key)
                parameters.append(inspect.Parameter(key, only, default=default, annotation=kind))
        elif name not in hints or parameter.default is inspect.Parameter.empty:
            raise ConfigError(f"the parameter {name!r} of the recipe {name_of(function)!r} needs a type and a default")
        else:
            parameters.append(parameter.replace(annotation=hints[name]))
    return inspect.Signature(parameters, return_annotation=Scheme)


def _documented(text: str, signature: inspect.Signature) -> str:
    """The docstring with a section of arguments, made from the parameters' help."""
    lines = []
    wrapper = textwrap.TextWrapper(116, " " * 4, " " * 8, break_long_words=False, break_on_hyphens=False)
    for name, parameter in signature.parameters.items():
        metadata = getattr(parameter.annotation, "__metadata__", ())
        told = next((each for each in metadata if isinstance(each, str)), "")
        lines += wrapper.wrap(f"{name}: {told}")
    return "\n".join([inspect.cleandoc(text), "", "Args:", *lines])


def _spelled(name: str, signature: inspect.Signature, values: Mapping[str, object]) -> str:
    """The scheme string, with only the values that differ from the recipe's defaults."""
    given: list[str] = []
    alone = _list_of(signature.parameters)
    for key, parameter in signature.parameters.items():
        default = _text(parameter.default, parameter)
        text = _text(values.get(key, parameter.default), parameter)
        if text not in (default, "None"):
            given.append(text if key == alone else f"{key}={text}")
    return f"{name}:{','.join(given)}" if given else name


def _text(value: object, parameter: inspect.Parameter) -> str:
    if isinstance(value, str) and Scheme in _types_of(parameter):
        value = scheme_within(value)
    if isinstance(value, Scheme):
        return value.name.replace(",", ";")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | Mapping):
        return text_of(value)
    # 2 and 2.0 are the same number, so the names must be the same.
    return str(value).removesuffix(".0")


def _read(text: str, types: Collection[type]) -> object:
    """The value of one of these types that a text stands for; the text itself if there is none, which is refused."""
    if bool in types:
        return {"true": True, "false": False}.get(text.lower(), text)
    with suppress(ValueError):
        if str not in types and Sequence not in types:
            return int(text) if int in types else float(text)
    return text


def _refusal(value: object, parameter: inspect.Parameter, scheme: str) -> str:
    types = _types_of(parameter)
    words = " or ".join(word for each, word in _WORDS.items() if each in types)
    if type(value) is int and int in types:
        words = f"a whole number of at most {UNLIMITED}"
    verb = "is" if bool in types else "takes"
    return f"{parameter.name} of the scheme {scheme!r} {verb} {words}, not {shown(value)}"


def _types_of(parameter: inspect.Parameter) -> set[type]:
    """The types that an annotation allows; a `Literal` of words counts as text."""
    kind = parameter.annotation
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else [kind]
    return {str if get_origin(each) is Literal else get_origin(each) or each for each in kinds}


def _list_of(parameters: Mapping[str, inspect.Parameter]) -> str | None:
    """The name of a recipe's only parameter, if it takes a list."""
    return next((key for key, each in parameters.items() if len(parameters) == 1 and Sequence in _types_of(each)), None)
