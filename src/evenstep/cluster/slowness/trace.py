"""Slowness as it was recorded."""

from dataclasses import dataclass
from typing import final

from evenstep.cluster.slowness.require import require_positive, require_worker
from evenstep.cluster.slowness.slowness import Slowness
from evenstep.core.errors import ConfigError


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Recorded factors, one per iteration, from the beginning again where they end.

    Attributes:
        worker: Whom it disturbs; None: every worker, all by the same factors.
        factors: At least one, each > 0; below 1 where the recorded worker was faster than its reference.

    Raises:
        ConfigError: A value lies outside its range.
    """

    worker: int | None = None
    factors: tuple[float, ...]

    def __post_init__(self) -> None:
        """Refuse values outside their ranges."""
        require_worker(self.worker)
        if not self.factors:
            raise ConfigError("factors must hold at least one number")
        for factor in self.factors:
            require_positive("each of factors", factor)

    def seconds(self, *, worker: int, iteration: int, batch_size: int, natural_seconds: float, now: float) -> float:
        """The natural seconds times this iteration's factor; the natural seconds for other workers."""
        if self.worker not in (None, worker):
            return natural_seconds
        return natural_seconds * self.factors[iteration % len(self.factors)]

    def slowness(self, before: Slowness, *, worker: int, iteration: int) -> Slowness:
        """As before, times this iteration's factor; for other workers as before."""
        if self.worker not in (None, worker):
            return before
        return before.then(factor=self.factors[iteration % len(self.factors)])
