"""The optimizers that a server runs, by name.

A peer cannot send code: a name outside the table must be allowed on the server's own command line.
"""

import importlib
from collections.abc import Collection
from types import MappingProxyType
from typing import Final

import torch

from evenstep.core.errors import ConfigError
from evenstep.tensors.outer import DelayedNesterov

OPTIMIZERS: Final = MappingProxyType(
    {
        cls.__name__: cls
        for cls in (
            torch.optim.SGD,
            torch.optim.Adam,
            torch.optim.AdamW,
            torch.optim.Adagrad,
            torch.optim.RMSprop,
            torch.optim.Adadelta,
            torch.optim.Adamax,
            torch.optim.NAdam,
            torch.optim.RAdam,
        )
    }
)
"""The optimizers that every server runs."""
LOOKS_AHEAD: Final = frozenset({"SGD", "Adam", "AdamW", "RMSprop"})
"""The optimizers whose momentum `core.sync.rate.look_ahead` describes."""


def optimizer_named(name: str, allowed: Collection[str]) -> type[torch.optim.Optimizer]:
    """Return the optimizer of this name; `allowed` are names "module.path:Class" beyond the table.

    Raises:
        ConfigError: The name is not allowed, or does not name an optimizer.
    """
    if name == DelayedNesterov.__name__:
        return DelayedNesterov
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    if name not in allowed:
        raise ConfigError(
            f"this server may not run the optimizer {name[:200]!r}: use {', '.join(OPTIMIZERS)}, or name it in"
            " the scheme that starts the servers (optimizer=module:Class)"
        )
    module, _, qualified = name.partition(":")
    try:
        kind = getattr(importlib.import_module(module), qualified)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"the optimizer {name!r} cannot be imported: {error}; give module.path:Class") from error
    if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer):
        raise ConfigError(f"{name!r} is not a torch optimizer: allow a class that is one")
    return kind
