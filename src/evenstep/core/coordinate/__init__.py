"""What parameter servers decide: one coordinator over *how far ahead*, the samples, the sizes and the epochs."""

from evenstep.core.coordinate.bundle import Bundle, CombinedPush
from evenstep.core.coordinate.commands import Answer, Arrival, CoordinatorCommand, Discard, PushKey, Update
from evenstep.core.coordinate.coordinator import Coordinator
from evenstep.core.coordinate.heartbeats import Heartbeats
from evenstep.core.coordinate.patience import Patience
from evenstep.core.coordinate.sizes import Sizes

__all__ = [
    "Answer",
    "Arrival",
    "Bundle",
    "CombinedPush",
    "Coordinator",
    "CoordinatorCommand",
    "Discard",
    "Heartbeats",
    "Patience",
    "PushKey",
    "Sizes",
    "Update",
]
