"""The element-wise optimizers that a server runs, by name.

No code comes from a peer: a name outside the table must stand on the server's own command line.
"""

import importlib
from collections.abc import Collection
from types import MappingProxyType
from typing import Final

import torch

from evenstep.core.errors import ConfigError

OPTIMIZERS: Final = MappingProxyType(
    {
        cls.__name__: cls
        for cls in (
            torch.optim.SGD,
            torch.optim.Adam,
            torch.optim.AdamW,
            torch.optim.Adagrad,
            torch.optim.RMSprop,
        )
    }
)
"""What every server can run."""


def optimizer_named(name: str, allowed: Collection[str]) -> type[torch.optim.Optimizer]:
    """The optimizer of this name; `allowed` are names "module.path:Class" beyond the table.

    Raises:
        ConfigError: The name is in neither, or stands for no optimizer.
    """
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    if name not in allowed:
        raise ConfigError(
            f"this server may not run the optimizer {name[:200]!r}: use {', '.join(OPTIMIZERS)}, or allow it by name on"
            " the server's command line"
        )
    module, _, qualified = name.partition(":")
    try:
        kind = getattr(importlib.import_module(module), qualified)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"the optimizer {name!r} cannot be imported: {error}; give module.path:Class") from error
    if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer):
        raise ConfigError(f"{name!r} is no torch optimizer: allow a class that is one")
    return kind
