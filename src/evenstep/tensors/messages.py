"""Views messages of gradients and weights as tensors, and copies between them and parameters."""

import math
from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import Final, cast

import numpy as np
import torch

from evenstep.protocol.layout import ParameterSpec, ShardLayout

DTYPES: Final = MappingProxyType(
    {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
)
"""PyTorch's dtype for each name in `protocol.layout`."""


def zeros(nbytes: int) -> torch.Tensor:
    """Make a message of zeros: through NumPy, which asks the system for large pages, as torch does not."""
    return torch.from_numpy(np.zeros(nbytes, dtype=np.uint8))


def as_message(layout: ShardLayout, buffer: torch.Tensor | memoryview) -> torch.Tensor:
    """View the buffer as bytes; ValueError unless it has `layout.nbytes` contiguous, writable bytes."""
    message = as_bytes(buffer)
    if message.numel() != layout.nbytes:
        raise ValueError(f"a buffer of {message.numel()} bytes is not a message of this shard: use {layout.nbytes}")
    return message


def flat_views(layout: ShardLayout, buffer: torch.Tensor | memoryview) -> list[torch.Tensor]:
    """Make a one-dimensional view of each block of a message; errors as for `as_message`."""
    message = as_message(layout, buffer)
    return [message[block.offset : block.end].view(DTYPES[block.dtype]) for block in layout.blocks]


def parameter_views(layout: ShardLayout, buffer: torch.Tensor | memoryview) -> list[torch.Tensor]:
    """View each parameter in a message, contiguous, in the order of `parameters`; errors as for `as_message`."""
    return [
        part.view(parameter.shape)
        for block, flat in zip(layout.blocks, flat_views(layout, buffer), strict=True)
        for parameter, part in zip(block.parameters, _split(flat, block.parameters), strict=True)
    ]


def as_bytes(buffer: torch.Tensor | memoryview) -> torch.Tensor:
    """View the buffer as bytes; ValueError unless its bytes are contiguous and writable."""
    if isinstance(buffer, memoryview):
        if buffer.readonly or not buffer.contiguous:
            raise ValueError("a message must lie in contiguous memory that can be written: give such a memoryview")
        return torch.frombuffer(buffer, dtype=torch.uint8)
    if buffer.dtype != torch.uint8 or buffer.ndim != 1 or not buffer.is_contiguous():
        raise ValueError(f"a message is a row of uint8, not {buffer.dtype} of shape {list(buffer.shape)}: view it so")
    return buffer


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, without a copy."""
    return cast("memoryview", memoryview(tensor.numpy()))  # type: ignore[arg-type]


@torch.no_grad()
def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """True if no tensor, or own part of a sharded one, holds a NaN or an infinity; the host waits for it.

    It needs no further memory, unlike `isfinite`. Types of one byte count as finite, since torch does not tell.
    """
    # Importing DTensor takes half a second.
    own = [each.to_local() if hasattr(each, "to_local") else each for each in tensors]
    plain = [torch.view_as_real(each) if each.is_complex() else each for each in own]
    # A single NaN is both minimum and maximum.
    edges = [torch.stack(torch.aminmax(each)).double() for each in plain if each.numel() and each.element_size() > 1]
    return not edges or bool(torch.cat([each.to(edges[0].device) for each in edges]).isfinite().all())


def norm_of(part: torch.Tensor) -> float:
    """Return the norm of a vector that needs no gradient, in at least float32. Not finite if an element is not.

    Otherwise it overflows only if float64 does.
    """
    wide = part if part.dtype.itemsize >= torch.float32.itemsize else part.float()
    squares = wide.dot(wide).item()
    # float64 is many times slower, but overflows later.
    return math.sqrt(squares) if math.isfinite(squares) else float(torch.linalg.vector_norm(part, dtype=torch.float64))


@torch.no_grad()
def gather(parameters: Sequence[torch.Tensor], views: Sequence[torch.Tensor]) -> None:
    """Copy the gradients of the parameters into the views, or zeros if a parameter has none."""
    absent = [view for parameter, view in zip(parameters, views, strict=True) if parameter.grad is None]
    present = [view for parameter, view in zip(parameters, views, strict=True) if parameter.grad is not None]
    gradients = [_dense(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if absent:
        torch._foreach_zero_(absent)
    if present:
        torch._foreach_copy_(present, gradients)


@torch.no_grad()
def scatter(views: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> None:
    """Copy the views into the parameters."""
    torch._foreach_copy_(list(parameters), list(views))


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    """Make an embedding's sparse gradient dense; every update rule here treats absent elements as zeros."""
    return gradient if gradient.layout == torch.strided else gradient.to_dense()


def _split(flat: torch.Tensor, parameters: Sequence[ParameterSpec]) -> Sequence[torch.Tensor]:
    return torch.split(flat, [parameter.elements for parameter in parameters])
