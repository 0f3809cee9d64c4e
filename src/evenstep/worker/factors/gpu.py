"""GPU availability through NVML, where the package nvidia-ml-py is installed; without it nothing is known."""

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, final

from evenstep.worker.factors.spaced import Spaced

_SECONDS: Final = 0.25
_MIN_SHARE: Final = 0.5


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GpuShares:
    """What of a GPU's time and memory this worker could have, each from 0 to 1."""

    time: float = 1.0
    memory: float = 1.0


@final
class GpuAvailability:
    """The part of one NVIDIA GPU that other processes leave.

    The device's utilisation as a whole would not do: it counts this worker's own kernels, and NCCL keeps a GPU busy
    while it waits. So the utilisation of each process is taken, and all but this one's are the others'. As on a CPU,
    they leave a half at least, because the device serves its processes in turn. That needs the driver to know this
    process by the same number as this machine does; in a container that it numbers apart, or where the driver does not
    tell, the time counts as all available.

    Memory is what no process holds, so the cache of PyTorch's allocator counts as used.

    Args:
        uuid: The device's, as NVML writes it.
        clock: Seconds that only rise.
    """

    def __init__(self, uuid: str, *, clock: Callable[[], float]) -> None:
        self._nvml: Any = None
        self._handle: Any = None
        self._since_microseconds = 0
        self._spaced = Spaced(self._read, seconds=_SECONDS, clock=clock)
        try:
            nvml: Any = importlib.import_module("pynvml")
        except ImportError:
            return
        try:
            nvml.nvmlInit()
        except nvml.NVMLError:
            return
        self._nvml = nvml
        try:
            self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        except nvml.NVMLError:
            self.close()

    def read(self) -> GpuShares:
        """The newest reading, four times a second at most."""
        return GpuShares() if self._nvml is None else self._spaced.value()

    def close(self) -> None:
        """Leave NVML; closing twice is fine."""
        nvml, self._nvml = self._nvml, None
        if nvml is not None:
            nvml.nvmlShutdown()

    def _read(self) -> GpuShares:
        return GpuShares(time=self._time(), memory=self._memory())

    def _time(self) -> float:
        nvml = self._nvml
        try:
            running = {process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)}
            if os.getpid() not in running:
                return 1.0
            samples = nvml.nvmlDeviceGetProcessUtilization(self._handle, self._since_microseconds)
        except nvml.NVMLError:  # No sample since the last reading is one of these.
            return 1.0
        self._since_microseconds = max((each.timeStamp for each in samples), default=self._since_microseconds)
        latest = {each.pid: each for each in sorted(samples, key=lambda each: int(each.timeStamp))}
        others = float(sum(each.smUtil for pid, each in latest.items() if pid != os.getpid())) / 100.0
        return max(1.0 - others, _MIN_SHARE)

    def _memory(self) -> float:
        try:
            memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        except self._nvml.NVMLError:
            return 1.0
        return float(memory.free / memory.total)
