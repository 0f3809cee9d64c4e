"""Several disturbances of the same compute, one on top of the other."""

from dataclasses import dataclass
from typing import final

from evenstep.cluster.slowness.base import Disturbance
from evenstep.cluster.slowness.slowness import Slowness


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Each part gets the seconds of the part before it as its natural seconds; the first gets the natural ones.

    The order matters: a device replaces what comes before it, and extra seconds are multiplied by a later factor.
    """

    parts: tuple[Disturbance, ...]

    def seconds(self, *, worker: int, iteration: int, batch_size: int, natural_seconds: float, now: float) -> float:
        """The seconds of the last part; the natural ones where there is no part."""
        seconds = natural_seconds
        for part in self.parts:
            seconds = part.seconds(
                worker=worker, iteration=iteration, batch_size=batch_size, natural_seconds=seconds, now=now
            )
        return seconds

    def slowness(self, before: Slowness, *, worker: int, iteration: int) -> Slowness:
        """That of the last part; what it was before where there is no part."""
        for part in self.parts:
            before = part.slowness(before, worker=worker, iteration=iteration)
        return before
