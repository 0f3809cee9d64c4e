"""Applies a disturbance to this worker: holds it until its emulated compute has taken as long as it should."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import final

from evenstep.cluster.slowness.base import Disturbance
from evenstep.cluster.slowness.device_memory import DeviceMemory
from evenstep.cluster.slowness.news import SlownessNews
from evenstep.core.errors import EvenstepError


@final
class EmulatedOutOfMemoryError(EvenstepError, MemoryError):
    """The batch is larger than what the emulated device holds."""


@final
@dataclass(slots=True, kw_only=True)
class Hold:
    """Holds one worker in the hook of its last gradient bucket.

    The earlier buckets have left by then, earlier than they would on the slow device: what is emulated is when a
    worker's gradient is complete, over the real communication stack.

    `overruns` counts the iterations whose real work took longer than the emulated time: they could not be emulated.
    `news` knows when there is something to tell of its slowness.
    """

    disturbance: Disturbance
    worker: int
    largest_batch: int
    memory: DeviceMemory | None = None
    clock: Callable[[], float]
    wait: Callable[[float], None]
    overruns: int = 0
    news: SlownessNews = field(init=False)
    _held_seconds: float = 0.0
    _began: float = field(init=False)

    def __post_init__(self) -> None:
        self._began = self.clock()
        self.news = SlownessNews(self.disturbance, self.worker)

    def begin_iteration(self) -> None:
        """A new iteration: nothing of it has been held yet."""
        self._held_seconds = 0.0

    def require_memory(self, batch_size: int) -> None:
        """Raise where the emulated device could not hold the batch.

        Raises:
            EmulatedOutOfMemoryError: It could not.
        """
        fits = self.largest_batch if self.memory is None else min(self.largest_batch, self.memory.largest_batch)
        if batch_size > fits:
            raise EmulatedOutOfMemoryError(
                f"worker {self.worker} was given {batch_size} samples but its emulated device holds at most"
                f" {fits}: lower the batch size or choose a scheme that minds memory, such as lb-bsp"
            )

    def until_due(self, *, iteration: int, batch_sizes: list[int], elapsed_seconds: float) -> None:
        """Wait until the emulated compute of these batches is over, `elapsed_seconds` after it began.

        `batch_sizes` has several members where gradients were accumulated; each counts as a pass of its own.
        """
        natural = (elapsed_seconds - self._held_seconds) / len(batch_sizes)
        now = self.clock() - self._began
        due = sum(
            self.disturbance.seconds(
                worker=self.worker, iteration=iteration, batch_size=size, natural_seconds=natural, now=now
            )
            for size in batch_sizes
        )
        rest = due - elapsed_seconds
        if rest > 0:
            self.wait(rest)
            self._held_seconds += rest
        elif -rest > 1e-6 and not self._held_seconds:
            self.overruns += 1
