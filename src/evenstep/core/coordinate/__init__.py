"""What parameter servers decide: one coordinator over *how far ahead*, the samples, the sizes and the epochs."""

from evenstep.core.coordinate.bundle import Agreed, Bundle, Ring, Together
from evenstep.core.coordinate.commands import Answer, Arrival, CoordinatorCommand, Discard, PushKey, Update
from evenstep.core.coordinate.coordinator import Coordinator
from evenstep.core.coordinate.heartbeats import Heartbeats
from evenstep.core.coordinate.patience import Patience
from evenstep.core.coordinate.sizes import Sizes

__all__ = [
    "Agreed",
    "Answer",
    "Arrival",
    "Bundle",
    "Coordinator",
    "CoordinatorCommand",
    "Discard",
    "Heartbeats",
    "Patience",
    "PushKey",
    "Ring",
    "Sizes",
    "Together",
    "Update",
]
