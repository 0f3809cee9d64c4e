"""Time in proportion to batch size."""

from dataclasses import dataclass
from typing import final

import numpy as np

from evenstep.core.values import IntArray


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ThroughOrigin:
    """t = `nanoseconds_per_sample` * x, int64 of shape [workers], each >= 1 (LB-BSP's model of CPU clusters)."""

    nanoseconds_per_sample: IntArray

    def nanoseconds(self, sizes: IntArray) -> IntArray:
        return self.nanoseconds_per_sample * sizes

    def largest(self, nanoseconds: int) -> IntArray:
        return np.floor_divide(nanoseconds, self.nanoseconds_per_sample)
