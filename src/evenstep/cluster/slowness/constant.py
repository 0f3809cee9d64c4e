"""Persistent slowness: the same in every iteration."""

from dataclasses import dataclass
from typing import final

from evenstep.cluster.slowness.require import require_at_least, require_worker
from evenstep.cluster.slowness.slowness import Slowness


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """A worker that is always slower: `factor` times its natural seconds, plus `extra_seconds`.

    Attributes:
        worker: Whom it slows; None: every worker.
        factor: Slowdown, >= 1.
        extra_seconds: Added to every iteration whatever its batch size, >= 0.

    Raises:
        ConfigError: A value lies outside its range.

    >>> Constant(worker=3, extra_seconds=0.05).seconds(
    ...     worker=3, iteration=0, batch_size=32, natural_seconds=0.1, now=0.0
    ... )
    0.45
    """

    worker: int | None = None
    factor: float = 4.0
    extra_seconds: float = 0.0

    def __post_init__(self) -> None:
        """Refuse values outside their ranges."""
        require_worker(self.worker)
        require_at_least("factor", self.factor, 1)
        require_at_least("extra_seconds", self.extra_seconds, 0)

    def seconds(self, *, worker: int, iteration: int, batch_size: int, natural_seconds: float, now: float) -> float:
        """The slowed seconds, or the natural ones where another worker is slowed."""
        if self.worker not in (None, worker):
            return natural_seconds
        return natural_seconds * self.factor + self.extra_seconds

    def slowness(self, before: Slowness, *, worker: int, iteration: int) -> Slowness:
        """As before, and slower; for other workers as before."""
        if self.worker not in (None, worker):
            return before
        return before.then(factor=self.factor, extra_seconds=self.extra_seconds)
