"""What every contestant is given and gives back; the standard library alone, so that any environment can read it."""

from dataclasses import dataclass, field

LEARNING_RATE = 2.0**-10
"""With gradients of ones and weights that begin at zero, every sum is exact in float32: so no lost update is missed."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model of one flat float32 tensor of `model_bytes`, exchanged by so many workers with one server."""

    model_bytes: int
    workers: int
    seconds: float
    """Of the timed part; a quarter of it comes before, as warm-up."""

    @property
    def elements(self):
        return self.model_bytes // 4


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One worker's timed part."""

    exchanges: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Measured:
    """All workers' timed parts of one run; `details` is what else a contestant wants recorded."""

    workers: tuple[Timed, ...]
    details: dict = field(default_factory=dict)

    @property
    def exchanges_per_second(self):
        """Of all workers together."""
        return sum(worker.exchanges / worker.seconds for worker in self.workers)
