"""The samples of an epoch as they were drawn: dataset indices by position."""

import zlib
from dataclasses import dataclass
from typing import Protocol, cast, final

import numpy as np

from evenstep.core.values import UNLIMITED, IntArray


class Indices(Protocol):
    """The dataset indices of an epoch by position. Indexed like an array, with int64 arrays of any shape."""

    def __getitem__(self, positions: IntArray, /) -> IntArray: ...


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drawn:
    """An epoch's samples, and the ends of its slices if a batch sampler made them."""

    indices: Indices
    ends: IntArray | None = None

    @property
    def shortest(self) -> int:
        """The number of samples in the shortest list, if a batch sampler gave lists."""
        return UNLIMITED if self.ends is None else int(np.diff(self.ends, prepend=0).min())

    @property
    def record(self) -> dict[str, object]:
        """The description of the indices that workers exchange: which they are, in any order, and how many lists."""
        samples = np.sort(cast("IntArray", self.indices))
        lists = None if self.ends is None else len(self.ends)
        return {"drawn": f"{len(samples)} samples, checksum {zlib.crc32(samples.tobytes()):08x}", "lists": lists}
