"""Distributed training that does not wait for its slowest worker.

    model, optimizer, loader = evenstep.prepare(model, optimizer, loader)

Importing this package imports no torch; `prepare` and `ShardedDataset` need it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from evenstep.core.errors import CheckpointError, ConfigError, DisagreementError, EvenstepError, WorkerLostError
from evenstep.schemes import Scheme, Served, asp, bsp, dbs, dssp, grouped, lb_bsp, local_sgd, ssp

if TYPE_CHECKING:
    from evenstep import checkpoint
    from evenstep.torch.data.shards import ShardedDataset
    from evenstep.torch.prepare import prepare

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DisagreementError",
    "EvenstepError",
    "Scheme",
    "Served",
    "ShardedDataset",
    "WorkerLostError",
    "__version__",
    "asp",
    "bsp",
    "checkpoint",
    "dbs",
    "dssp",
    "grouped",
    "lb_bsp",
    "local_sgd",
    "prepare",
    "ssp",
]


_OF_TORCH = {"prepare": "evenstep.torch.prepare", "ShardedDataset": "evenstep.torch.data.shards"}


def __getattr__(name: str) -> Any:
    """Load what needs torch when it is first asked for."""
    if name not in ("checkpoint", *_OF_TORCH):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        if name == "checkpoint":
            return import_module("evenstep.checkpoint")
        return getattr(import_module(_OF_TORCH[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(
            f"evenstep.{name} needs PyTorch: install the build for your device, or 'evenstep[torch]'",
            name="torch",
        ) from error
