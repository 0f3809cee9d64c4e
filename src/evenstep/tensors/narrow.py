"""Narrow formats in which the differences of models travel: bfloat16, and int8 with a scale for each block."""

import torch

from evenstep.schemes.scheme import WIRE_BLOCK, Wire


def pack(values: torch.Tensor, wire: Wire) -> torch.Tensor:
    """Round a vector of float32, whose length is a multiple of `WIRE_BLOCK`, to the nearest of the format; uint8.

    A block of int8 is preceded, all scales first, by a float32: its largest magnitude over 127. A NaN or an infinity
    leaves nothing finite in its block.
    """
    if wire == "bf16":
        return values.to(torch.bfloat16).view(torch.uint8)
    blocks = values.view(-1, WIRE_BLOCK)
    scales = torch.linalg.vector_norm(blocks, torch.inf, dim=1) / 127
    whole = (blocks * torch.where(scales > 0, 1 / scales, 0.0)[:, None]).round_().to(torch.int8)
    return torch.cat([scales.view(torch.uint8), whole.view(-1).view(torch.uint8)])


def unpack(packed: torch.Tensor, wire: Wire) -> torch.Tensor:
    """The values of what `pack` made, in float32."""
    if wire == "bf16":
        return packed.view(torch.bfloat16).float()
    blocks = packed.numel() // (WIRE_BLOCK + 4)
    scales = packed[: 4 * blocks].view(torch.float32)
    return packed[4 * blocks :].view(torch.int8).view(blocks, WIRE_BLOCK).float().mul_(scales[:, None]).view(-1)
