"""The decisions of parameter servers: one coordinator for *how far ahead*, the samples, the sizes and the epochs."""

from evenstep.core.coordinate.bundle import Bundle, CombinedPush
from evenstep.core.coordinate.commands import Answer, Apply, Arrival, CoordinatorCommand, Given, PushKey
from evenstep.core.coordinate.coordinator import Coordinator
from evenstep.core.coordinate.presence import Lost, Presence

__all__ = [
    "Answer",
    "Apply",
    "Arrival",
    "Bundle",
    "CombinedPush",
    "Coordinator",
    "CoordinatorCommand",
    "Given",
    "Lost",
    "Presence",
    "PushKey",
]
