"""Reads the arguments of a script under every framework, and says what a wrong one must be."""

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import NoneType
from typing import Any, Final, final, get_type_hints

from evenstep.core.errors import ConfigError
from evenstep.core.nearest import nearest
from evenstep.core.shown import shown
from evenstep.core.values import plain
from evenstep.schemes import Scheme


@final
@dataclass(frozen=True, slots=True)
class Argument:
    """An argument with the `name` of its field, or another one.

    `read` returns its value, or raises TypeError, ValueError or OverflowError. The text of a ConfigError, which is a
    ValueError, replaces the message made from `must_be`.
    """

    must_be: str
    read: Callable[[Any], object]
    name: str = ""


def require_known(given: Iterable[str], known: Collection[str], who: str) -> None:
    """Check that `who`, a function or a class, has all given arguments; TypeError with the nearest name if not."""
    for name in given:
        if name not in known:
            raise TypeError(f"{who} has no argument {name!r}: {nearest(name, known)}")


def read_arguments(record: type[Any], given: Mapping[str, object]) -> tuple[dict[str, Any], str | None]:
    """Read those of the given arguments that fields of the record are annotated with.

    Returns:
        The values of the fields, without those of wrong arguments; and what is wrong with the first of these, if any.
    """
    values: dict[str, Any] = {}
    mistake: str | None = None
    for field, hint in get_type_hints(record, include_extras=True).items():
        for argument in getattr(hint, "__metadata__", ()):
            if (name := argument.name or field) in given:
                try:
                    values[field] = argument.read(given[name])
                except (TypeError, ValueError, OverflowError) as error:
                    own = str(error) if isinstance(error, ConfigError) else None
                    mistake = mistake or own or f"{name} must be {argument.must_be}, not {shown(given[name])}"
    return values, mistake


def read_whole(value: object, least: int, most: int) -> int:
    """Return a whole number in this range; ValueError if it is something else."""
    number = plain(value)
    if not isinstance(number, int) or isinstance(number, bool) or not least <= number <= most:
        raise ValueError("no such number")
    return number


def whole(least: int, most: int) -> Argument:
    """A whole number in this range."""
    return Argument(f"a whole number from {least} to {most}", partial(read_whole, least=least, most=most))


def read_kind(value: object, kinds: tuple[type, ...]) -> object:
    """Return the value; TypeError if it is of none of these kinds."""
    if not isinstance(value, kinds):
        raise TypeError("of another kind")
    return value


def read_path(value: object) -> str | None:
    """Return the path as text, or None; TypeError or ValueError if it is something else."""
    if value is None:
        return None
    text = os.fspath(value)  # type: ignore[call-overload]
    if not isinstance(text, str) or not text or "\0" in text:
        raise ValueError("no path")
    return text


SCHEME: Final = Argument(
    "a scheme string such as 'lb-bsp', or what a recipe such as evenstep.schemes.lb_bsp() returns",
    partial(read_kind, kinds=(Scheme, str, NoneType)),
)
SEED: Final = Argument("a whole number of at most 64 bits", partial(read_whole, least=-(2**63), most=2**63 - 1))
RUN_DIR: Final = Argument("the path of a folder", read_path)
SWITCH: Final = Argument("True or False", lambda value: read_kind(plain(value), (bool,)))
