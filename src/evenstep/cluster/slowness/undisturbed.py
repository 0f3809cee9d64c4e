"""The member that does nothing."""

from dataclasses import dataclass
from typing import final

from evenstep.cluster.slowness.slowness import Slowness


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Undisturbed:
    """Every iteration takes its natural time."""

    def seconds(self, *, worker: int, iteration: int, batch_size: int, natural_seconds: float, now: float) -> float:
        """The natural seconds."""
        return natural_seconds

    def slowness(self, before: Slowness, *, worker: int, iteration: int) -> Slowness:
        """As before."""
        return before
