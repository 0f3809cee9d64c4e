"""Trains for real, on PyTorch. It measures, exchanges and applies; what to decide is asked of the core."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evenstep.torch.gathering import all_gather as all_gather


def __getattr__(name: str) -> Any:
    """Load what a script asks for by this name; most need nothing of it."""
    if name != "all_gather":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from evenstep.torch.gathering import all_gather

    return all_gather
