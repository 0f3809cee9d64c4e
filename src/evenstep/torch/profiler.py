"""Measures this device under the script's own loop: hands out batches of ever larger sizes, and ends the script."""

import resource
from dataclasses import replace
from typing import final

import numpy as np
import psutil
from torch.utils.data import DataLoader

from evenstep.cluster.profile import ProfilePoint, enough, next_size
from evenstep.core.errors import ConfigError
from evenstep.core.samples import Ledger, Share, Shares
from evenstep.telemetry import Recorder
from evenstep.torch.data.loader import require_preparable
from evenstep.torch.device_memory import CudaMemory
from evenstep.torch.processes.workers import Workers
from evenstep.torch.request import Agreement, Request
from evenstep.worker.balancer import Balancer
from evenstep.worker.device_memory import EmulatedMemory, LearntLimit, MemoryProbe


def to_be_profiled(request: Request) -> Request:
    """The request with what a profile needs: one process that fetches for itself, and no scheme.

    Where events go and what is emulated is the profile's to say, not the script's.

    Raises:
        ConfigError: The loader cannot be prepared.
    """
    loader = require_preparable(request.loader)
    plain = DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        sampler=loader.sampler,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
    )
    return replace(
        request, loader=plain, scheme="bsp", batch_sizes=None, global_batch_size=None, run_dir=None, emulate=None
    )


@final
class Profiler:
    """The `Shares` of a run that is a profile.

    Args:
        balancer: Measures the compute of an iteration.
        largest: The largest size to try.
        memory: What the peaks are measured with.
        recorder: Takes an event `profiled` for each size, and one `profile` in the end.
    """

    misses = 0

    def __init__(self, balancer: Balancer, *, largest: int, memory: MemoryProbe, recorder: Recorder) -> None:
        self._balancer = balancer
        self._largest = largest
        self._memory = memory
        self._limit = LearntLimit(memory)
        self._recorder = recorder
        self._points: list[ProfilePoint] = []
        self._seconds: list[float] = []
        self._size: int | None = None
        self._length = 0
        self._handed_out = 0

    def shares(self, ledger: Ledger, *, epoch: int, depth: int) -> Shares:
        """The shares of the next loop, which go on where the one before was left."""
        self._length = ledger.length
        return self

    def share(self) -> Share:
        """The batch to measure next.

        Raises:
            SystemExit: Everything has been measured, and the script is over.
        """
        self._take_in()
        if self._size is None:
            self._recorder.record({"event": "profile", "capacity_bytes": self._memory.capacity_bytes})
            raise SystemExit(0)
        first = self._handed_out
        self._handed_out += self._size
        return Share(
            iteration=first,
            positions=tuple(position % self._length for position in range(first, first + self._size)),
            samples=self._size,
            sizes=np.array([self._size], dtype=np.int64),
        )

    def replan(self) -> None:
        """Sizes are decided when they are asked for."""

    def advance(self) -> None:
        """The batch was counted when it was asked for."""

    def request(self, limit: int) -> tuple[int, tuple[int, ...]] | None:
        """Nothing is fetched ahead."""
        return None

    def _take_in(self) -> None:
        """What the batch before took; the size to go on with."""
        if self._size is not None:
            self._seconds.append(self._balancer.compute_seconds())
            if not enough(self._seconds):
                return
            peak = self._memory.peak_bytes(self._size)
            point = ProfilePoint.of(self._size, self._seconds, peak)
            self._points.append(point)
            self._limit.observe(self._size)
            self._recorder.record(
                {
                    "event": "profiled",
                    "samples": point.samples,
                    "seconds": point.seconds,
                    "peak_bytes": peak,
                    "spread": point.spread,
                }
            )
        self._seconds = []
        self._size = next_size(
            self._points,
            smallest=self._balancer.smallest_batch,
            largest=min(self._largest, self._limit.largest_size()),
        )


def profiler_of(
    request: Request, agreement: Agreement, balancer: Balancer, workers: Workers, recorder: Recorder
) -> Profiler | None:
    """What measures this run; None where it is no profile.

    Raises:
        ConfigError: There are several workers.
    """
    largest = request.launched.profile
    if largest is None:
        return None
    if workers.count > 1:
        raise ConfigError("a profile is one worker's: start it without torchrun")
    device = next(request.models[0].parameters()).device
    probe: MemoryProbe
    if agreement.emulation.memory is not None:
        probe = EmulatedMemory(agreement.emulation.memory)
    elif device.type == "cuda":
        probe = CudaMemory(device)
    else:
        probe = HostMemory()
    return Profiler(balancer, largest=largest, memory=probe, recorder=recorder)


@final
class HostMemory:
    """The memory of this process, as the system counts it: its peak never falls, so sizes must rise."""

    rounding_bytes = 2**20

    def __init__(self) -> None:
        self.base_bytes = self.peak_bytes(0)
        self.capacity_bytes = psutil.virtual_memory().available + self.base_bytes

    def begin(self) -> None:
        """Nothing can be forgotten."""

    def peak_bytes(self, batch_size: int) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
