"""Time with a fixed part: what a GPU shows from some batch size on."""

from dataclasses import dataclass
from typing import final

from evenstep.core.values import IntArray


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Affine:
    """t = `fixed_nanoseconds` + `nanoseconds_per_sample` * x, int64 of shape [workers], the latter >= 1."""

    fixed_nanoseconds: IntArray
    nanoseconds_per_sample: IntArray

    def nanoseconds(self, sizes: IntArray) -> IntArray:
        return self.fixed_nanoseconds + self.nanoseconds_per_sample * sizes

    def largest(self, nanoseconds: int) -> IntArray:
        return (nanoseconds - self.fixed_nanoseconds) // self.nanoseconds_per_sample
