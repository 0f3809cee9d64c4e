"""Time models that count samples in multiples."""

from dataclasses import dataclass
from typing import final

from evenstep.core.load.times.base import TimeModels
from evenstep.core.values import IntArray


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InMultiples:
    """Wraps time models: a size of x is x times `multiple` samples of theirs."""

    times: TimeModels
    multiple: int

    def nanoseconds(self, sizes: IntArray) -> IntArray:
        return self.times.nanoseconds(sizes * self.multiple)

    def largest(self, nanoseconds: int) -> IntArray:
        return self.times.largest(nanoseconds) // self.multiple
