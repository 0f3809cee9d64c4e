"""Distributed training that does not wait for its slowest worker.

    model, optimizer, loader = evenstep.prepare(model, optimizer, loader)

Importing this package imports no torch; `prepare` needs it.
"""

from typing import TYPE_CHECKING, Any

from evenstep.core.errors import ConfigError, DisagreementError, EvenstepError, WorkerLostError
from evenstep.schemes import Scheme, Served, asp, bsp, dbs, dssp, grouped, lb_bsp, local_sgd, ssp

if TYPE_CHECKING:
    from evenstep.runtime.prepare import prepare

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "DisagreementError",
    "EvenstepError",
    "Scheme",
    "Served",
    "WorkerLostError",
    "__version__",
    "asp",
    "bsp",
    "dbs",
    "dssp",
    "grouped",
    "lb_bsp",
    "local_sgd",
    "prepare",
    "ssp",
]


def __getattr__(name: str) -> Any:
    """Load what needs torch when it is first asked for."""
    if name != "prepare":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from evenstep.runtime.prepare import prepare
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(
            "evenstep.prepare needs PyTorch: install the build for your device, or 'evenstep[torch]'",
            name="torch",
        ) from error
    return prepare
