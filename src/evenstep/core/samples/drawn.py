"""The samples of an epoch as they were drawn: dataset indices by position."""

from dataclasses import dataclass
from typing import Protocol, final

import numpy as np

from evenstep.core.values import UNLIMITED, IntArray


class Indices(Protocol):
    """The dataset indices of an epoch by position; int64 arrays of any shape, as an array has it."""

    def __getitem__(self, positions: IntArray, /) -> IntArray: ...


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drawn:
    """An epoch's samples, and where its slices end if a batch sampler made them."""

    indices: Indices
    ends: IntArray | None = None

    @property
    def shortest(self) -> int:
        """The samples of the shortest list, if a batch sampler gave lists."""
        return UNLIMITED if self.ends is None else int(np.diff(self.ends, prepend=0).min())
