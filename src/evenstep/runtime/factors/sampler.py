"""All factors of one worker, and which of them apply to it."""

from collections.abc import Callable
from pathlib import Path
from typing import Final, final

import torch

from evenstep.core.values import Factors
from evenstep.runtime.factors.base import FactorSampler
from evenstep.runtime.factors.cpu import CpuAvailability
from evenstep.runtime.factors.gpu import GpuAvailability, GpuShares
from evenstep.runtime.factors.memory import MemoryAvailability
from evenstep.runtime.factors.spaced import Spaced

_CPU_SECONDS: Final = 0.05


@final
class MachineSampler:
    """Reads the machine; `gpu` is None for a worker that computes on the CPU.

    Iterations shorter than 50 ms share a reading: the CPU's is a mean over about as long.
    """

    def __init__(
        self,
        *,
        cpu: CpuAvailability,
        memory: MemoryAvailability,
        gpu: GpuAvailability | None,
        clock: Callable[[], float],
    ) -> None:
        self._cpu = cpu
        self._cpu_availability = Spaced(cpu.read, seconds=_CPU_SECONDS, clock=clock, rests=0.0)
        self._memory = memory
        self._gpu = gpu

    def sample(self) -> Factors:
        """The factors now."""
        gpu = GpuShares() if self._gpu is None else self._gpu.read()
        return Factors(
            cpu_availability=self._cpu_availability.value(),
            memory_availability=self._memory.read(),
            gpu_availability=gpu.time,
            gpu_memory_availability=gpu.memory,
        )

    def close(self) -> None:
        """Let go of files and of NVML."""
        self._cpu.close()
        self._memory.close()
        if self._gpu is not None:
            self._gpu.close()


def factor_sampler(
    device: torch.device, clock: Callable[[], float], *, threads: int | None = None, root: Path = Path("/")
) -> FactorSampler:
    """The sampler for a worker that computes on this device.

    Args:
        device: Where the model is.
        clock: Seconds that only rise.
        threads: The threads that compute at once on the CPU; by default PyTorch's, and one for a model on a GPU.
        root: The folder that holds `proc` and the mounts of the control groups.
    """
    on_gpu = device.type == "cuda"
    if threads is None:
        threads = 1 if on_gpu else torch.get_num_threads()
    gpu = None
    if on_gpu:
        gpu = GpuAvailability(f"GPU-{torch.cuda.get_device_properties(device).uuid}", clock=clock)
    return MachineSampler(
        cpu=CpuAvailability(root, threads=threads, clock=clock),
        memory=MemoryAvailability(root, clock=clock),
        gpu=gpu,
        clock=clock,
    )
