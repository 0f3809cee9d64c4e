"""A tensor's memory as what sockets take."""

from typing import cast

import torch


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, without a copy; writing into it writes into the tensor."""
    return cast("memoryview", memoryview(tensor.numpy()))  # type: ignore[arg-type]
