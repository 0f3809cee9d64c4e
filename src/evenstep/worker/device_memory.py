"""Learns how much of its device's memory a worker's batches take, and how large they may become."""

import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol, final

import psutil

from evenstep.cluster.slowness import DeviceMemory
from evenstep.core.memory import MemoryModel
from evenstep.worker.factors import group_folders


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
        """Start an iteration: forget the peak before."""

    def peak_bytes(self, batch_size: int) -> int:
        """Return the peak since `begin`, of an iteration whose largest batch was `batch_size`."""


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
    """This process's memory as the system counts it. Its peak never falls, so sizes must rise.

    Args:
        workers: The workers on this host, which share its free memory, or the free memory of their control group.
        root: The folder that holds `proc` and `sys`.
    """

    rounding_bytes = 2**20

    def __init__(self, workers: int = 1, *, root: Path = Path("/")) -> None:
        self.base_bytes = self.peak_bytes(0)
        free = min([psutil.virtual_memory().available, *_free_in_groups(root)])
        self.capacity_bytes = max(free, 0) // workers + self.base_bytes

    def begin(self) -> None:
        """Do nothing: the peak cannot be reset."""

    def peak_bytes(self, batch_size: int) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@final
class AddressSpace:
    """The addresses that RLIMIT_AS still leaves to this process; libraries hold most of those that are taken.

    Their peak never falls, so sizes must rise. A quarter stays free, because the freed addresses that the C library
    keeps, and how it places a tensor between them, differ from one size to the next.
    """

    base_bytes = 0
    rounding_bytes = 64 * 2**20  # The C library reserves this many addresses for each thread.

    def __init__(self) -> None:
        self._taken = _peak_addresses()
        self.capacity_bytes = max(3 * (resource.getrlimit(resource.RLIMIT_AS)[0] - self._taken) // 4, 1)

    def begin(self) -> None:
        """Do nothing: the peak cannot be reset."""

    def peak_bytes(self, batch_size: int) -> int:
        return _peak_addresses() - self._taken


def _peak_addresses() -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:  # Not every system has it.
        return int(psutil.Process().memory_info().vms)
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmPeak:"))


def host_memory(workers: int) -> MemoryProbe:
    """Return the memory of a worker on a CPU, with this many workers on its host."""
    limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    return AddressSpace() if limited else HostMemory(workers)


def _free_in_groups(root: Path) -> Iterator[int]:
    """Yield the free memory of this process's control group and of its parents, as far as they have a limit.

    Pages of files that were not used lately count as free.
    """
    two, one = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for folder, names in group_folders(root, "memory", two=two, one=one):
        with suppress(OSError, ValueError):  # `max`, or a removed group.
            limit, used = (int((folder / name).read_text()) for name in names)
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            yield limit - used + int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))


@final
class LearntLimit:
    """Learns the largest batch of this worker from the peaks of its iterations.

    `failed` is a batch size that did not fit in an earlier run. `largest_run` is the largest batch that has run, and
    `capacity_bytes` the memory that this process can have.
    """

    def __init__(self, probe: MemoryProbe, *, failed: int | None = None) -> None:
        self.largest_run = 0
        self.capacity_bytes = probe.capacity_bytes
        self.begin = probe.begin
        self._probe = probe
        self._model = MemoryModel(
            capacity_bytes=probe.capacity_bytes, base_bytes=probe.base_bytes, rounding_bytes=probe.rounding_bytes
        )
        self.largest_size = self._model.largest_size
        if failed is not None:
            self._model.out_of_memory(failed)

    def observe(self, batch_size: int) -> None:
        """Learn from an iteration whose compute is over; `batch_size` is its largest batch."""
        self.largest_run = max(batch_size, self.largest_run)
        self._model.observe(batch_size, self._probe.peak_bytes(batch_size))
