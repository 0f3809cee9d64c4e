"""Checkpoints of objects, made from the fields of their dataclasses."""

from collections import deque
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Final, TypeVar, cast, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from evenstep.core.values import State

_T = TypeVar("_T")

_AS_THEY_ARE: Final = frozenset({int, float, str, bool, NoneType})


class Stateful:
    """Base of dataclasses whose state is the fields that their constructor does not take: those with `init=False`.

    A field that has a state itself, or a list of such objects, is always part of it. Fields may be numbers, strings,
    arrays of numbers, lists, dicts, deques, named tuples or dataclasses of these, or None. A class that is not a
    dataclass has no state, unless it defines both methods.
    """

    __slots__ = ()

    def state_dict(self) -> State:
        """Return everything that `load_state_dict` needs to continue bit for bit; JSON can hold it."""
        return {name.lstrip("_"): _plain(getattr(self, name)) for name in self._remembered()}

    def load_state_dict(self, state: State) -> None:
        """Continue from the given state."""
        for name, kind in self._remembered().items():
            present, saved = getattr(self, name), state[name.lstrip("_")]
            if _has_state(type(present)):
                present.load_state_dict(saved)
            elif isinstance(present, list) and present and _has_state(type(present[0])):
                for each, of_each in zip(present, cast("list[State]", saved), strict=True):
                    each.load_state_dict(of_each)
            elif isinstance(present, deque):
                setattr(self, name, deque(_restored(list[get_args(kind)[0]], saved), present.maxlen))  # type: ignore[misc]
            else:
                setattr(self, name, _restored(kind, saved))

    def _remembered(self) -> dict[str, Any]:
        """The annotations of the fields that make up the state, by name."""
        return {
            name: kind
            for name, (kind, given) in _fields(type(self)).items()
            if not given or _has_state(type(getattr(self, name)))
        }


def _once(function: Callable[[Any], _T]) -> Callable[[Any], _T]:
    """Look each type up once: some states are taken in every iteration."""
    return cache(function)


@_once
def _fields(kind: type) -> dict[str, tuple[Any, bool]]:
    """The annotation of each field of a dataclass, and whether the constructor takes it; empty for other classes."""
    if not is_dataclass(kind):
        return {}
    annotations = get_type_hints(kind)
    return {field.name: (annotations[field.name], field.init) for field in fields(kind)}


@_once
def _has_state(kind: type) -> bool:
    return callable(getattr(kind, "state_dict", None))


def _plain(value: Any) -> object:  # noqa: ANN401 - a value of any annotation
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if _has_state(kind):
        return value.state_dict()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):  # JSON's keys are strings.
        return [[key, _plain(each)] for key, each in value.items()]
    if isinstance(value, list | tuple | deque):
        return [_plain(each) for each in value]
    return {name: _plain(getattr(value, name)) for name in _fields(kind)} or value


def _restored(kind: Any, saved: Any) -> Any:  # noqa: ANN401 - a value of any annotation
    """The value of this annotation that `_plain` turned into the saved one."""
    origin, arguments = get_origin(kind), get_args(kind)
    if saved is None:
        return None
    if origin is UnionType:
        return _restored(next(each for each in arguments if each is not NoneType), saved)
    if origin in (np.ndarray, NDArray):  # NDArray[float64] is an ndarray[Any, dtype[float64]] before NumPy 2.5.
        return np.array(saved, dtype=(get_args(arguments[-1]) or arguments)[0])
    if origin is list:
        return [_restored(arguments[0], each) for each in saved]
    if origin is dict:
        return {key: _restored(arguments[1], each) for key, each in saved}
    if is_dataclass(kind):
        annotations = _fields(kind)
        return cast("Any", kind)(**{name: _restored(annotations[name][0], each) for name, each in saved.items()})
    if isinstance(kind, type) and issubclass(kind, tuple):
        return kind(*map(_restored, get_type_hints(kind).values(), saved))
    return saved
