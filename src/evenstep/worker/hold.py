"""Emulates a slow device: holds this worker until its emulated compute is over."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import final

from evenstep.cluster.slowness import Chain, DeviceMemory, Disturbance, SlownessNews, factors_of
from evenstep.core.errors import EvenstepError
from evenstep.core.values import Factors


@final
class EmulatedOutOfMemoryError(EvenstepError, MemoryError):
    """The batch does not fit the emulated device."""


@final
@dataclass(slots=True, kw_only=True)
class Hold:
    """Holds one worker in the hook of its last gradient bucket.

    The earlier buckets have left by then, earlier than they would on the slow device. So it emulates the time at which
    the whole gradient is complete, over the real communication stack.

    Attributes:
        largest_batch: The known limit of the device. `memory` sets a limit that evenstep has to learn.
        change_seconds: The additional time of the first batch of a size.
        overruns: The number of iterations whose real work took longer than the emulated time.
        news: Reports the changes of its slowness.
    """

    disturbance: Disturbance
    worker: int
    largest_batch: int
    memory: DeviceMemory | None = None
    change_seconds: float = 0.0
    wait: Callable[[float], None]
    overruns: int = 0
    news: SlownessNews = field(init=False)
    _held_seconds: float = field(init=False, default=0.0)
    _slowed: float = field(init=False, default=1.0)
    _iteration: int = field(init=False, default=0)
    _sizes: set[float] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self.news = SlownessNews(self.disturbance, self.worker)

    def of_peer(self) -> "Hold":
        """Return the hold of another process of this worker, which is not slowed: it waits for this one as it is.

        Slowed too, each would take its wait for the other for compute, and slow that again.
        """
        return replace(self, disturbance=Chain(parts=()), change_seconds=0.0)

    def begin_iteration(self) -> None:
        """Start a new iteration, which has not been held yet."""
        self._held_seconds = 0.0

    def require_memory(self, batch_size: int, *, by_cost: bool = False) -> None:
        """Raise EmulatedOutOfMemoryError if the emulated device could not hold the batch.

        `by_cost`: its size is given in average samples.
        """
        fits = self.largest_batch if self.memory is None else min(self.largest_batch, self.memory.largest_batch)
        if batch_size > fits:
            samples = "samples of average cost" if by_cost else "samples"
            raise EmulatedOutOfMemoryError(
                f"worker {self.worker} was given {batch_size} {samples} but its emulated device holds at most"
                f" {fits}: lower the batch size or choose a scheme that minds memory, such as lb-bsp"
            )

    def until_due(self, iteration: int, batch_sizes: Sequence[float], elapsed_seconds: float) -> None:
        """Wait until the emulated compute of these batches is over, `elapsed_seconds` after it started.

        Samples that differ in cost are counted as average samples, so sizes need not be whole. If gradients were
        accumulated there are several batches; each counts as a pass.
        """
        self._iteration = iteration
        whole = elapsed_seconds - self._held_seconds
        natural = whole / len(batch_sizes)
        due = sum(
            self.disturbance.seconds(worker=self.worker, iteration=iteration, batch_size=size, natural_seconds=natural)
            for size in batch_sizes
        )
        if self.change_seconds:
            new = {*batch_sizes} - self._sizes
            self._sizes |= new
            due += len(new) * self.change_seconds
        self._slowed = due / whole if whole > 0 else 1.0
        if not self._wait(due - elapsed_seconds) and elapsed_seconds - due > 1e-6 and not self._held_seconds:
            self.overruns += 1

    def so_far(self, elapsed_seconds: float) -> None:
        """Wait for the time due for the compute so far, if it is slowed as the last iteration was.

        For models whose workers wait for each other in the middle of an iteration.
        """
        self._wait((elapsed_seconds - self._held_seconds) * self._slowed - elapsed_seconds)

    def _wait(self, seconds: float) -> bool:
        if seconds <= 0:
            return False
        self.wait(seconds)
        self._held_seconds += seconds
        return True

    def sample(self) -> Factors:
        """Return the driving factors before the iteration after the one that was held last."""
        return factors_of(self.disturbance, worker=self.worker, iteration=self._iteration + 1)


def identity_of(device: str, hold: Hold | None) -> str:
    """Return a text that identifies this worker, in later runs too: its device, and what is emulated on it."""
    if hold is None:
        return device
    emulated = repr((hold.disturbance, hold.largest_batch, hold.memory)).encode()
    return f"{device}, emulating {hashlib.blake2b(emulated, digest_size=4).hexdigest()}"
