"""How much of its device's memory a worker's batches take, and how large they may become."""

import resource
from typing import Protocol, final

import psutil

from evenstep.cluster.slowness import DeviceMemory
from evenstep.core.load.memory import MemoryModel


class MemoryProbe(Protocol):
    """Measures the peak memory of an iteration.

    Attributes:
        capacity_bytes: The memory that this process can have.
        base_bytes: The memory that it had taken before it trained.
        rounding_bytes: How far the allocator's rounding moves a peak.
    """

    capacity_bytes: int
    base_bytes: int
    rounding_bytes: int

    def begin(self) -> None:
        """An iteration starts: forget the peak before."""

    def peak_bytes(self, batch_size: int) -> int:
        """The peak since `begin`, of an iteration whose largest batch was `batch_size`."""


@final
class EmulatedMemory:
    """The memory of an emulated device, whose peak follows from the batch size."""

    rounding_bytes = 0

    def __init__(self, memory: DeviceMemory) -> None:
        self.peak_bytes = memory.peak_bytes
        self.capacity_bytes = memory.capacity_bytes
        self.base_bytes = memory.fixed_bytes

    def begin(self) -> None:
        pass


@final
class HostMemory:
    """This process's memory as the system counts it. Its peak never falls, so sizes must rise."""

    rounding_bytes = 2**20

    def __init__(self) -> None:
        self.base_bytes = self.peak_bytes(0)
        self.capacity_bytes = psutil.virtual_memory().available + self.base_bytes

    def begin(self) -> None:
        """The peak cannot be reset."""

    def peak_bytes(self, batch_size: int) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@final
class LearntLimit:
    """Learns the largest batch of this worker from the peaks of its iterations.

    `failed` is a batch size that did not fit in an earlier run. `largest_run` is the largest batch that has run.
    """

    def __init__(self, probe: MemoryProbe, *, failed: int | None = None) -> None:
        self.largest_run = 0
        self.begin = probe.begin
        self._probe = probe
        self._model = MemoryModel(
            capacity_bytes=probe.capacity_bytes, base_bytes=probe.base_bytes, rounding_bytes=probe.rounding_bytes
        )
        self.largest_size = self._model.largest_size
        if failed is not None:
            self._model.out_of_memory(failed)

    def observe(self, batch_size: int) -> None:
        """The iteration's compute is over; `batch_size` is its largest batch."""
        self.largest_run = max(batch_size, self.largest_run)
        self._model.observe(batch_size, self._probe.peak_bytes(batch_size))
