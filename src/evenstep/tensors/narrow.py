"""Narrow formats in which gradients and differences of models travel: bfloat16, int8 with a scale for each block."""

from collections.abc import Iterable
from typing import Final, final

import torch

from evenstep.protocol.layout import ShardLayout
from evenstep.schemes.scheme import NARROWING, WIRE_BLOCK, Wire
from evenstep.tensors.messages import flat_views


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


@final
class NarrowMessages:
    """Messages of a shard on a narrow wire: the numbers of a message, one after another, as `pack` makes them.

    Attributes:
        nbytes: The length of such a message.
    """

    def __init__(self, layout: ShardLayout, wire: Wire) -> None:
        self._layout, self._wire = layout, wire
        elements = [block.elements for block in layout.blocks]
        self._length: Final = -(-sum(elements) // WIRE_BLOCK) * WIRE_BLOCK
        self._sizes: Final = [*elements, self._length - sum(elements)]
        self.nbytes: Final = round(4 * self._length * NARROWING[wire])

    def round(self, message: torch.Tensor, left: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Round the numbers of a message in place, after adding what rounding has `left` out of the one before.

        Returns the packed message, and what rounding leaves out of this one, also that to the parameters' own type.
        """
        values = self._vector(flat_views(self._layout, message))
        if left is not None:
            values += left
        packed = pack(values, self._wire)
        self.write(packed, message)
        return packed, values.sub_(self._vector(flat_views(self._layout, message)))

    def write(self, packed: torch.Tensor, message: torch.Tensor) -> None:
        """Write what was packed into a message."""
        for flat, values in self._parts(packed, message):
            flat.copy_(values)

    def approach(self, message: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
        """Move a message towards another by their rounded difference, and return that, packed."""
        both = zip(flat_views(self._layout, goal), flat_views(self._layout, message), strict=True)
        packed = pack(self._vector(one - other for one, other in both), self._wire)
        self.add(packed, message)
        return packed

    def add(self, packed: torch.Tensor, message: torch.Tensor) -> None:
        """Add what was packed to a message."""
        for flat, values in self._parts(packed, message):
            flat.add_(values)

    def _vector(self, flats: Iterable[torch.Tensor]) -> torch.Tensor:
        vector = torch.zeros(self._length, dtype=torch.float32)  # The default type is the script's.
        for part, flat in zip(torch.split(vector, self._sizes), flats, strict=False):
            part.copy_(flat)
        return vector

    def _parts(self, packed: torch.Tensor, message: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        values = torch.split(unpack(packed, self._wire), self._sizes)
        return zip(flat_views(self._layout, message), values, strict=False)
