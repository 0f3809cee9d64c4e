"""Trains for real, on PyTorch. It measures, exchanges and applies; what to decide is asked of the core."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evenstep.torch.engines.known_parameters import leave_alone as leave_alone
    from evenstep.torch.gathering import all_gather as all_gather

_LATER = {"all_gather": "gathering", "leave_alone": "engines.known_parameters"}


def __getattr__(name: str) -> Any:
    """Load what few scripts ask for, when it is asked for."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
