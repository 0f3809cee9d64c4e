"""What a loader's state holds, checked before a loader goes on from it."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from evenstep.core.errors import ConfigError
from evenstep.core.shown import shown
from evenstep.core.values import UNLIMITED
from evenstep.torch.arguments import LARGEST_SEED, whole_number


def checked_state(state: object) -> dict[str, Any]:
    """The state, which may have come from a file.

    Raises:
        ConfigError: It is of another version, or lacks what every loader's state has.
    """
    if not isinstance(state, Mapping):
        raise ConfigError(f"a loader goes on from what its state_dict() returned, not from {shown(state)}")
    if state.get("version") != 1:
        raise ConfigError(f"this loader state has version {shown(state.get('version'))}, not 1: it cannot be resumed")
    for name, check in _FIELDS.items():
        try:
            check(state.get(name))
        except (TypeError, ValueError):
            raise ConfigError(
                f"this loader state is damaged ({name} is {shown(state.get(name))}): give what a loader's state_dict()"
                " returned"
            ) from None
    if state["order"] is not None and len(state["order"]) != state["length"]:
        raise ConfigError(
            f"this loader state is damaged (an order of {len(state['order'])} for {state['length']} samples): give what"
            " a loader's state_dict() returned"
        )
    return dict(state)


def _order(value: object) -> None:
    if value is None:
        return
    if not isinstance(value, list):
        raise TypeError("no list")
    for position in value:
        whole_number(position, 0, UNLIMITED)


def _mapping(value: object) -> None:
    if not isinstance(value, Mapping):
        raise TypeError("no mapping")


_COUNT: Final = partial(whole_number, least=0, most=UNLIMITED)
_FIELDS: Final[Mapping[str, Callable[[Any], object]]] = MappingProxyType(
    {
        "seed": partial(whole_number, least=-LARGEST_SEED - 1, most=LARGEST_SEED),
        "epoch": _COUNT,
        "iteration": _COUNT,
        "length": _COUNT,
        "global_batch_size": partial(whole_number, least=1, most=UNLIMITED),
        "order": _order,
        "load": _mapping,
    }
)
