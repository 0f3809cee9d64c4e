"""Weighted sums of gradients: added in their order, in float32 where they are narrower, and rounded once."""

from collections.abc import Sequence

import torch

from evenstep.protocol.layout import ShardLayout
from evenstep.tensors.messages import flat_views

_CHUNK_ELEMENTS = 2**20


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums are taken in."""
    return dtype if dtype.itemsize >= torch.float32.itemsize else torch.float32


def add_up(parts: Sequence[tuple[torch.Tensor, float]], total: torch.Tensor) -> None:
    """Write the weighted sum of the parts, of which there is one at least, into `total`."""
    first, weight = parts[0]
    if first.dtype == total.dtype:
        torch.mul(first, weight, out=total)
    else:
        total.copy_(first).mul_(weight)
    for part, factor in parts[1:]:
        total.add_(part, alpha=factor)


@torch.no_grad()
def combined(layout: ShardLayout, messages: Sequence[tuple[torch.Tensor, float]]) -> torch.Tensor:
    """The weighted sum of these messages, of which there is one at least, as a message."""
    whole = torch.empty(layout.nbytes, dtype=torch.uint8)
    parts = [(flat_views(layout, message), weight) for message, weight in messages]
    for block, total in enumerate(flat_views(layout, whole)):
        for start in range(0, total.numel(), _CHUNK_ELEMENTS):
            own = slice(start, start + _CHUNK_ELEMENTS)
            chunk = total[own]
            summed = chunk if wide(chunk.dtype) == chunk.dtype else torch.empty_like(chunk, dtype=wide(chunk.dtype))
            add_up([(flat[block][own], weight) for flat, weight in parts], summed)
            if summed is not chunk:
                chunk.copy_(summed)
    return whole
