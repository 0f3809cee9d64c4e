"""Recipes: functions that make schemes, registered by a decorator, and the one parser of scheme strings.

This is the only place where a name stands for an algorithm. A recipe states each parameter once, in its signature. From
there the decorator takes its type, its default, its line in the docstring, how a scheme string spells it, and the
scheme's name: the string that makes the same scheme, without parameters that have their defaults. Parameters are
separated by commas; those of a scheme within a scheme by semicolons. A list, which is the only parameter of its recipe,
stands without its name: `static:12/9/3`.
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
from typing import Annotated, Any, Final, Literal, ParamSpec, Union, cast, get_args, get_origin, get_type_hints

import numpy as np

from evenstep.core.errors import ConfigError
from evenstep.core.nearest import nearest
from evenstep.core.shown import shown
from evenstep.core.values import UNLIMITED
from evenstep.schemes.given_sizes import read_sizes, text_of
from evenstep.schemes.scheme import Scheme, Served, ServerOptions

P = ParamSpec("P")

DEFAULT = "lb-bsp"

_WORDS: Final = {
    bool: "true or false", int: "a whole number", float: "a number", Scheme: "a scheme", str: "a name",
    Sequence: "batch sizes such as 12/9/3",
}  # fmt: skip
_BOOLEANS: Final = {"true": True, "false": False}
_OTHER_SIGN: Final = re.compile(r"(?P<name>[A-Za-z_-]+)\s*[,;\s]\s*(?P<rest>[a-z_]+\s*=.{0,100})")

_recipes: Final[dict[str, Callable[..., Scheme]]] = {}
RECIPES: Final = MappingProxyType(_recipes)
"""The recipes that a scheme string can name, in the order of their registration: evenstep's, then `MODULE:RECIPE`."""


def recipe(function: Callable[P, Scheme]) -> Callable[P, Scheme]:
    """Register a recipe, so that scheme strings can name it.

    Its name is the function's, with dashes; `evenstep.ssp(bound=2)` is `ssp:bound=2`. A recipe outside evenstep has its
    module before that: `my_module:my-recipe:window=3`. Every parameter has a default and is annotated with `int`,
    `float`, `bool`, `str`, a `Literal` of strings, `Scheme`, a union of these or with None, or `Annotated` of one with
    a line of help. `**served: Unpack[ServerOptions]` stands for the options of all
    parameter servers. The recipe returns a `Scheme`, to which the decorator gives its name.

    Raises:
        ConfigError: By the recipe, if an argument has another type than its annotation.
    """
    annotated = _signature(function)
    signature = _without_help(annotated)
    name = _name_of(function)

    @functools.wraps(function)
    def checked(*positional: P.args, **named: P.kwargs) -> Scheme:
        given = signature.bind(*positional, **named).arguments
        values = {key: require_type(value, signature.parameters[key], name) for key, value in given.items()}
        made: object = cast("Callable[..., Scheme]", function)(**values)
        if not isinstance(made, Scheme):
            raise ConfigError(f"the recipe {name!r} gave {shown(made)}: return an evenstep.Scheme from it")
        return replace(made, name=_spelled(name, signature, values))

    checked.__signature__ = signature  # type: ignore[attr-defined]
    checked.__doc__ = _documented(function.__doc__ or "", annotated)
    _recipes[name] = checked
    return checked


def parse_scheme(text: Scheme | str, *, imports: bool = True) -> Scheme:
    """The scheme that a string such as `lb-bsp:predictor=ema,multiple=8` or `my_module:my-recipe:window=3` stands for.

    Args:
        text: The scheme string; a scheme stands for itself.
        imports: Whether to import the module that it names. Without, only recipes are known that are registered
            already: what a peer sends must not import anything.

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
            "a scheme must be a string such as 'lb-bsp', or what a recipe such as evenstep.lb_bsp() returns, not"
            f" {shown(text)}"
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
        arguments[key] = _read(value, parameters[key], name)
    return recipe(**arguments)


def recipe_named(text: str, *, imports: bool = True) -> tuple[str, str]:
    """The key of `RECIPES` at the beginning of a scheme string, and the parameters after it, as `parse_scheme`."""
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
        raise ConfigError(
            f"the module {shown(first)} has no recipe {shown(second)}: "
            + (nearest(_canonical(second), known) if known else "put @evenstep.recipe before a function in it")
        )
    return name, parameters


def scheme_within(value: Scheme | str) -> Scheme:
    """A scheme that is the value of another's parameter, where semicolons may separate its own parameters."""
    return parse_scheme(value.replace(";", ",")) if isinstance(value, str) else value


def sizes_of(recipe: str, load: Scheme | str) -> Scheme:
    """The scheme that lends its sizes to another.

    Raises:
        ConfigError: It says more than how much each worker computes, or no string makes it.
    """
    sizes = scheme_within(load)
    bare = Scheme(name=sizes.name, load=sizes.load, nonfinite=sizes.nonfinite)
    if sizes != bare or "nonfinite" in sizes.name:
        raise ConfigError(
            f"{recipe} takes only the sizes of {sizes.name!r}: leave out what it says beside them (weighting,"
            " exchange, micro_batch, period, nonfinite, servers)"
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


def import_recipes(module: str, folder: str | None = None) -> None:
    """Import a user's module, so that its recipes are registered; from the given or the present folder, too.

    Raises:
        ConfigError: It cannot be imported.
    """
    folder = os.getcwd() if folder is None else folder
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        import_module(module)
    except Exception as error:
        why = str(error).partition("\n")[0]
        raise ConfigError(
            f"the module {shown(module)} of a scheme cannot be imported ({type(error).__name__}: {why}): check its name"
            f" and that it is in {folder} or on PYTHONPATH"
        ) from error


def recipe_modules(allow: Collection[str] = ()) -> list[tuple[str, str]]:
    """The users' modules whose recipes are registered in this process, and the folders to import them from.

    With the modules of the optimizers, `module:Class`, that servers may run; these are imported.

    Raises:
        ConfigError: One cannot be imported.
    """
    for name in allow:
        import_recipes(name.partition(":")[0])
    found = {name.partition(":")[0] for name in (*RECIPES, *allow) if ":" in name} - {"__main__"}
    modules = [(name, Path(str(sys.modules[name].__file__)).resolve()) for name in sorted(found)]
    return [(name, str(file.parents[name.count(".") + (file.stem == "__init__")])) for name, file in modules]


def require_type(value: object, parameter: inspect.Parameter, scheme: str) -> Any:  # noqa: ANN401 - as the annotation
    """The value, if it is what the annotation of this parameter of a scheme says; NumPy's integers become Python's.

    Raises:
        ConfigError: It is not, or is a whole number beyond any that can be meant.
    """
    types = _types_of(parameter)
    if Sequence in types:
        with suppress(TypeError):
            return read_sizes(value)
    elif type(value) is int or isinstance(value, np.integer):
        if {int, float} & types and abs(int(value)) <= UNLIMITED:
            return int(value)
    elif type(value) in types or isinstance(value, tuple(types - {int, bool})):
        return value
    raise ConfigError(_refusal(value, parameter, scheme))


def _canonical(name: str) -> str:
    return name.lower().replace("_", "-")


def _meant(text: str) -> str | None:
    """What was meant by a name that is followed by another sign than a colon; None if it is not."""
    match = _OTHER_SIGN.fullmatch(text.strip())
    if match is None or _canonical(match["name"]) not in RECIPES:
        return None
    return f"did you mean '{match['name']}:{match['rest']}'?"


def _name_of(function: Callable[..., object]) -> str:
    name, module = _canonical(function.__name__), function.__module__
    return name if module.startswith("evenstep.") else f"{module}:{name}"


def _signature(function: Callable[..., object]) -> inspect.Signature:
    """Its signature with all annotations resolved, and server options as parameters of their own."""
    hints = get_type_hints(function, include_extras=True)
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            parameters += _server_options()
        elif name not in hints or parameter.default is inspect.Parameter.empty:
            raise ConfigError(f"the parameter {name!r} of the recipe {_name_of(function)!r} needs a type and a default")
        else:
            parameters.append(parameter.replace(annotation=hints[name]))
    return inspect.Signature(parameters, return_annotation=Scheme)


def _server_options() -> list[inspect.Parameter]:
    kinds, defaults = get_type_hints(ServerOptions, include_extras=True), Served()
    keyword = inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(name, keyword, default=getattr(defaults, name), annotation=kind)
        for name, kind in kinds.items()
    ]


def _without_help(signature: inspect.Signature) -> inspect.Signature:
    parameters = []
    for each in signature.parameters.values():
        kind = each.annotation
        parameters.append(each.replace(annotation=get_args(kind)[0] if get_origin(kind) is Annotated else kind))
    return signature.replace(parameters=parameters)


def _documented(text: str, signature: inspect.Signature) -> str:
    """The docstring with a section of arguments, from the help of the parameters."""
    lines = [
        textwrap.fill(
            f"{name}: {_help(parameter)}",
            116,
            initial_indent=" " * 4,
            subsequent_indent=" " * 8,
            break_on_hyphens=False,
            break_long_words=False,
        )
        for name, parameter in signature.parameters.items()
    ]
    return "\n".join([inspect.cleandoc(text), "", "Args:", *lines])


def _help(parameter: inspect.Parameter) -> str:
    metadata = getattr(parameter.annotation, "__metadata__", ())
    return next((each for each in metadata if isinstance(each, str)), "")


def _spelled(name: str, signature: inspect.Signature, values: Mapping[str, object]) -> str:
    """The scheme string with the values that differ from the recipe's defaults."""
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
    # 2 and 2.0 are the same number, and so have the same name.
    return str(value).removesuffix(".0")


def _read(text: str, parameter: inspect.Parameter, scheme: str) -> Any:  # noqa: ANN401 - as the annotation
    """The value of a parameter in a scheme string, as `require_type`."""
    types = _types_of(parameter)
    if {str, Sequence} & types:
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
    """The types that an annotation allows; a literal of a few words is a text, and the recipe checks which."""
    kind = parameter.annotation
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else [kind]
    return {str if get_origin(each) is Literal else get_origin(each) or each for each in kinds}


def _list_of(parameters: Mapping[str, inspect.Parameter]) -> str | None:
    """The only parameter of a recipe, if it takes a list."""
    return next((key for key, each in parameters.items() if len(parameters) == 1 and Sequence in _types_of(each)), None)
