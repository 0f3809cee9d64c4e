"""Time that does not depend on the batch size until the device is full."""

from dataclasses import dataclass
from typing import final

import numpy as np

from evenstep.core.load.times.base import TimeModels
from evenstep.core.values import IntArray


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlatStart:
    """Wraps time models: up to `flat_size` samples, int64 of shape [workers], take as long as that many.

    Around `Affine` it is the piecewise-linear relation of LB-BSP's first version (arXiv 1806.02508 v1): a device that
    is not saturated takes more samples at no cost. The paper's limit by memory is the problem's `maximum` here.
    """

    times: TimeModels
    flat_size: IntArray

    def nanoseconds(self, sizes: IntArray) -> IntArray:
        return self.times.nanoseconds(np.maximum(sizes, self.flat_size))

    def largest(self, nanoseconds: int) -> IntArray:
        """The largest size that each worker finishes within the given time; -1 where that is none of the flat ones."""
        sizes = self.times.largest(nanoseconds)
        return np.where(sizes >= self.flat_size, sizes, -1)
