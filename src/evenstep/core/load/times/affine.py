"""Time with a fixed part and a flat start: what a GPU shows."""

from dataclasses import dataclass
from typing import final

import numpy as np

from evenstep.core.values import IntArray


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Affine:
    """t = `fixed_nanoseconds` + `nanoseconds_per_sample` * max(x, `flat_size`), int64 of shape [workers].

    The piecewise-linear relation of LB-BSP's first version (arXiv 1806.02508 v1): up to `flat_size` samples a device is
    not saturated and more of them cost nothing; the paper's limit by memory is the problem's `maximum` here.
    `nanoseconds_per_sample` >= 1; `flat_size` 0 means no flat start.
    """

    fixed_nanoseconds: IntArray
    nanoseconds_per_sample: IntArray
    flat_size: IntArray | int = 0

    def nanoseconds(self, sizes: IntArray) -> IntArray:
        return self.fixed_nanoseconds + self.nanoseconds_per_sample * np.maximum(sizes, self.flat_size)

    def largest(self, nanoseconds: int) -> IntArray:
        """The largest size that each worker finishes within the given time; -1 where it finishes none."""
        sizes = (nanoseconds - self.fixed_nanoseconds) // self.nanoseconds_per_sample
        return np.where(sizes >= self.flat_size, sizes, -1)
