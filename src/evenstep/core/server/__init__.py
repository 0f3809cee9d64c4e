"""What parameter servers decide: one coordinator over *how far ahead*, the samples, the sizes and the epochs."""

from evenstep.core.server.bundle import Agreed, Bundle, Ring, Together
from evenstep.core.server.commands import Answer, Arrival, CoordinatorCommand, Discard, PushKey, Update
from evenstep.core.server.coordinator import Coordinator
from evenstep.core.server.heartbeats import Heartbeats
from evenstep.core.server.patience import Patience
from evenstep.core.server.sizes import Sizes

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
