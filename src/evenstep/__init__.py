"""Distributed training that does not wait for its slowest worker.

    model, optimizer, loader = evenstep.prepare(model, optimizer, loader)

Importing this package imports no torch; `prepare`, `Padded` and `ShardedDataset` need it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from evenstep import schemes
from evenstep.core.errors import CheckpointError, ConfigError, DisagreementError, EvenstepError, WorkerLostError
from evenstep.core.samples.parts import balance
from evenstep.core.version import VERSION
from evenstep.schemes import Scheme

if TYPE_CHECKING:
    from evenstep import checkpoint, policies
    from evenstep.launch.servers import start_servers
    from evenstep.torch.costs import Padded
    from evenstep.torch.data.shards import ShardedDataset
    from evenstep.torch.prepare import prepare
    from evenstep.torch.session import Session
    from evenstep.worker.api.balancer import Balancer
    from evenstep.worker.api.client import Client
    from evenstep.worker.api.share import Share

__version__ = VERSION

__all__ = [
    "Balancer",
    "CheckpointError",
    "Client",
    "ConfigError",
    "DisagreementError",
    "EvenstepError",
    "Padded",
    "Scheme",
    "Session",
    "ShardedDataset",
    "Share",
    "WorkerLostError",
    "__version__",
    "balance",
    "checkpoint",
    "policies",
    "prepare",
    "schemes",
    "start_servers",
]


_OF_TORCH = {
    "prepare": "evenstep.torch.prepare",
    "Session": "evenstep.torch.session",
    "Padded": "evenstep.torch.costs",
    "ShardedDataset": "evenstep.torch.data.shards",
}
_OF_WORKER = {
    "Balancer": "evenstep.worker.api.balancer",
    "Client": "evenstep.worker.api.client",
    "Share": "evenstep.worker.api.share",
    "start_servers": "evenstep.launch.servers",
}


def __getattr__(name: str) -> Any:
    """Load what needs torch, or what few scripts need, when it is first asked for."""
    if name == "policies":
        return import_module("evenstep.policies")
    if name in _OF_WORKER:
        return getattr(import_module(_OF_WORKER[name]), name)
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
            f"evenstep.{name} needs PyTorch: pip install torch, or install the build for your device",
            name="torch",
        ) from error
