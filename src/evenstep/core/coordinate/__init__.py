"""What parameter servers decide: one coordinator over *how far ahead*, the samples, the sizes and the epochs."""

from evenstep.core.coordinate.bundle import Bundle, CombinedPush
from evenstep.core.coordinate.commands import Answer, Apply, Arrival, CoordinatorCommand, Discard, Given, PushKey
from evenstep.core.coordinate.coordinator import Coordinator
from evenstep.core.coordinate.patience import Heartbeats, Patience
from evenstep.core.coordinate.sizes import Sizes

__all__ = [
    "Answer",
    "Apply",
    "Arrival",
    "Bundle",
    "CombinedPush",
    "Coordinator",
    "CoordinatorCommand",
    "Discard",
    "Given",
    "Heartbeats",
    "Patience",
    "PushKey",
    "Sizes",
]
