"""A change in the middle of a run: slow from one iteration on."""

from dataclasses import dataclass
from typing import final

from evenstep.cluster.slowness.require import require_at_least, require_worker
from evenstep.cluster.slowness.slowness import Slowness
from evenstep.core.errors import ConfigError


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class From:
    """A worker that is slow from iteration `first` on, up to but without iteration `until`.

    Several explicit intervals are a chain of several of these.

    Attributes:
        worker: Whom it slows; None: every worker.
        factor: Slowdown inside the interval, >= 1.
        first: The first slow iteration, from 0.
        until: The first iteration that is fast again, > `first`; None: slow to the end of the run.

    Raises:
        ConfigError: A value lies outside its range.
    """

    worker: int | None = None
    factor: float = 4.0
    first: int
    until: int | None = None

    def __post_init__(self) -> None:
        """Refuse values outside their ranges."""
        require_worker(self.worker)
        require_at_least("factor", self.factor, 1)
        require_at_least("first", self.first, 0)
        if self.until is not None and self.until <= self.first:
            raise ConfigError(f"until must be greater than first, which is {self.first}, not {self.until!r}")

    def seconds(self, *, worker: int, iteration: int, batch_size: int, natural_seconds: float, now: float) -> float:
        """The slowed seconds inside the interval, the natural ones outside it and for other workers."""
        return natural_seconds * self.factor if self._is_slow(worker, iteration) else natural_seconds

    def slowness(self, before: Slowness, *, worker: int, iteration: int) -> Slowness:
        """As before, and slower inside the interval; for other workers as before."""
        return before.then(factor=self.factor) if self._is_slow(worker, iteration) else before

    def _is_slow(self, worker: int, iteration: int) -> bool:
        began = self.worker in (None, worker) and iteration >= self.first
        return began and (self.until is None or iteration < self.until)
