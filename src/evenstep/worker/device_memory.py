"""How much of its device's memory a worker's batches take, and how large they may become."""

from typing import Protocol, final

from evenstep.cluster.slowness.device_memory import DeviceMemory
from evenstep.core.load.memory import MemoryModel


class MemoryProbe(Protocol):
    """Measures the peak memory of an iteration.

    `capacity_bytes` is what this process can have; `base_bytes` what it has taken before it trains; `rounding_bytes`
    how far an allocator's rounding moves a peak.
    """

    capacity_bytes: int
    base_bytes: int
    rounding_bytes: int

    def begin(self) -> None:
        """An iteration begins: forget the peak before."""

    def peak_bytes(self, batch_size: int) -> int:
        """The peak since then, of an iteration whose largest batch had that size."""


@final
class EmulatedMemory:
    """The memory of an emulated device."""

    rounding_bytes = 0

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self.capacity_bytes = memory.capacity_bytes
        self.base_bytes = memory.fixed_bytes

    def begin(self) -> None:
        """Nothing to forget: the peak follows from the size."""

    def peak_bytes(self, batch_size: int) -> int:
        return self._memory.peak_bytes(batch_size)


@final
class LearntLimit:
    """The largest batch of this worker, learnt from the peaks of its iterations; `failed` did not fit earlier.

    `largest_run` is the largest batch that has run.
    """

    def __init__(self, probe: MemoryProbe, *, failed: int | None = None) -> None:
        self._probe = probe
        self.largest_run = 0
        self._model = MemoryModel(
            capacity_bytes=probe.capacity_bytes, base_bytes=probe.base_bytes, rounding_bytes=probe.rounding_bytes
        )
        if failed is not None:
            self._model.out_of_memory(failed)

    def begin(self) -> None:
        """An iteration begins."""
        self._probe.begin()

    def observe(self, batch_size: int) -> None:
        """The iteration's compute is over; `batch_size` is its largest batch."""
        self.largest_run = max(batch_size, self.largest_run)
        self._model.observe(batch_size, self._probe.peak_bytes(batch_size))

    def largest_size(self) -> int:
        """The largest batch that is safe, in samples; UNLIMITED as long as nothing is known."""
        return self._model.largest_size()
