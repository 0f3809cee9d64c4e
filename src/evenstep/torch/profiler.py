"""Measures this device under the script's own loop: hands out batches of ever larger sizes, and ends the script."""

from dataclasses import replace
from typing import final

import numpy as np
from torch.utils.data import DataLoader

from evenstep.cluster.profile import ProfilePoint, enough, next_size
from evenstep.core.errors import ConfigError
from evenstep.core.load.limits import DEFAULT_MINIMUM
from evenstep.core.samples import EpochCosts, Ledger, Share, Shares
from evenstep.telemetry import Recorder
from evenstep.telemetry.events import Profiled, ProfileDone
from evenstep.torch.agree import Agreement
from evenstep.torch.cuda import CudaMemory
from evenstep.torch.data.sampling import Sampling
from evenstep.torch.find_batch import Finder
from evenstep.torch.processes.workers import Workers
from evenstep.torch.refusals import require_loader
from evenstep.torch.request import Request
from evenstep.worker.device_memory import EmulatedMemory, LearntLimit, MemoryProbe, host_memory
from evenstep.worker.hold import Hold
from evenstep.worker.tracker import Tracker


def to_be_profiled(request: Request) -> Request:
    """The request as a profile needs it: fetching in this process, without a scheme.

    The profile, not the script, decides where events go and what is emulated. So does a search for the largest batches,
    except that the script may emulate.

    Raises:
        ConfigError: The loader cannot be prepared.
    """
    loader = require_loader(request.loader)
    sampling = Sampling.of(loader)
    plain = DataLoader(
        loader.dataset,
        # Sizes are the profile's. Those of a script whose batches do not fit must not stop the search at its start.
        batch_size=(sampling.batch_size or 1) if request.launched.find_batch is None else DEFAULT_MINIMUM,
        sampler=None if sampling.lists else sampling.sampler,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
    )
    emulate = None if request.launched.find_batch is None else request.emulate
    return replace(
        request, loader=plain, scheme="bsp", batch_sizes=None, global_batch_size=None, run_dir=None, emulate=emulate
    )


def probe_of(request: Request, hold: Hold | None, workers_here: int) -> MemoryProbe:
    """What measures the memory of this worker; `workers_here` share its host's."""
    if hold is not None and hold.memory is not None:
        return EmulatedMemory(hold.memory)
    return CudaMemory(request.device) if request.device.type == "cuda" else host_memory(workers_here)


def profiler_of(
    request: Request, agreement: Agreement, balancer: Tracker, workers: Workers, recorder: Recorder
) -> "Profiler | Finder | None":
    """The profiler of this run, or what finds its largest batches; None if it is an ordinary run.

    Raises:
        ConfigError: There are several workers.
    """
    if request.launched.find_batch is not None:
        return Finder(request.launched.find_batch, agreement, balancer, workers)
    largest = request.launched.profile
    if largest is None:
        return None
    if workers.count > 1:
        raise ConfigError("a profile is one worker's: start it without torchrun")
    probe = probe_of(request, agreement.own.hold, 1)
    return Profiler(balancer, largest=largest, memory=probe, recorder=recorder)


@final
class Profiler:
    """The `Shares` of a run that is a profile.

    Args:
        balancer: Measures the compute of an iteration.
        largest: The largest size to try.
        memory: Measures the peaks.
        recorder: Takes an event `profiled` for each size, and `profile` at the end.
    """

    misses = 0

    def __init__(self, balancer: Tracker, *, largest: int, memory: MemoryProbe, recorder: Recorder) -> None:
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

    def shares(self, ledger: Ledger, *, epoch: int, depth: int, costs: EpochCosts | None = None) -> Shares:
        """The shares of the next loop, which continue those of the last."""
        self._length = ledger.length
        return self

    def share(self) -> Share:
        """The batch to measure next.

        Raises:
            SystemExit: Everything has been measured, and the script is over.
        """
        self._take_in()
        if self._size is None:
            self._recorder.record(ProfileDone(worker=0, capacity_bytes=self._memory.capacity_bytes))
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
        """Sizes are decided in `share`."""

    def advance(self) -> None:
        """The batch was counted in `share`."""

    def request(self, limit: int | None, *, whole: bool = False) -> None:
        """Nothing is fetched ahead."""
        return None

    def _take_in(self) -> None:
        """Take in the last iteration's time and peak, and decide the next size."""
        if self._size is not None:
            self._seconds.append(self._balancer.stopwatch.read())
            if not enough(self._seconds):
                return
            peak = self._memory.peak_bytes(self._size)
            point = ProfilePoint.of(self._size, self._seconds, peak)
            self._points.append(point)
            self._limit.observe(self._size)
            self._recorder.record(
                Profiled(
                    worker=0,
                    samples=point.samples,
                    seconds=point.seconds,
                    peak_bytes=peak,
                    spread=point.spread,
                )
            )
        self._seconds = []
        self._size = next_size(
            self._points, smallest=self._balancer.smallest_batch, largest=min(self._largest, self._limit.largest_size())
        )
