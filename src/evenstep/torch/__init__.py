"""Real training on PyTorch: it measures, exchanges and applies. The decisions are made by the core."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evenstep.torch.data.loader import PreparedLoader
    from evenstep.torch.engines.steps import leave_alone
    from evenstep.torch.gathering import all_gather

__all__ = ["PreparedLoader", "all_gather", "leave_alone"]

_LATER = {"PreparedLoader": "data.loader", "all_gather": "gathering", "leave_alone": "engines.steps"}


def __getattr__(name: str) -> Any:
    """Load rarely used names on first access."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
