"""The memory of a CUDA device, as PyTorch's allocator uses it."""

from typing import final

import torch

from evenstep.core.load.memory import ROUNDING_BYTES


@final
class CudaMemory:
    """A CUDA device through PyTorch's allocator, whose free cache counts as free.

    It resets the allocator's peak statistics in every iteration, so a script's own reading of them sees one iteration.
    """

    rounding_bytes = ROUNDING_BYTES

    def __init__(self, device: torch.device) -> None:
        free, _ = torch.cuda.mem_get_info(device)
        self._device = device
        self.capacity_bytes = free + torch.cuda.memory_reserved(device)
        self.base_bytes = torch.cuda.memory_allocated(device)

    def begin(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak_bytes(self, batch_size: int) -> int:
        """As the host sees it when the backward pass has been launched: allocations are made by the host."""
        return torch.cuda.max_memory_allocated(self._device)
