"""All factors of one worker, and which of them apply to it."""

from collections.abc import Callable
from pathlib import Path
from typing import Final, final

from evenstep.core.values import Factors
from evenstep.worker.factors.base import FactorSampler
from evenstep.worker.factors.cpu import CpuAvailability
from evenstep.worker.factors.gpu import GpuAvailability, GpuShares
from evenstep.worker.factors.memory import MemoryAvailability
from evenstep.worker.factors.spaced import Spaced

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
    clock: Callable[[], float], *, threads: int, gpu: str | None = None, root: Path = Path("/")
) -> FactorSampler:
    """The sampler for a worker.

    Args:
        clock: Returns seconds that only rise.
        threads: How many threads compute at once on the CPU.
        gpu: The UUID of the GPU that the worker computes on, as NVML has it; None for a worker on the CPU.
        root: The folder that holds `proc` and the mounts of the control groups.
    """
    return MachineSampler(
        cpu=CpuAvailability(root, threads=threads, clock=clock),
        memory=MemoryAvailability(root, clock=clock),
        gpu=None if gpu is None else GpuAvailability(gpu, clock=clock),
        clock=clock,
    )
