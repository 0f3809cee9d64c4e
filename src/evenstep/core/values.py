"""The values that pass between the parts: what was observed, what is asked, what was decided.

Arrays have one element per worker, by rank. Values from which several workers must decide alike are integers, so that
no two processors round them differently.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, Self, TypeAlias

import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = npt.NDArray[np.int64]
State: TypeAlias = dict[str, object]
"""A checkpoint: plain numbers, strings, lists and dicts, so that JSON can hold it."""

Basis: TypeAlias = Literal["speed", "start", "comparison"]
"""Reason for the sizes: decided; equal because no speeds are known yet; equal for a few iterations, to compare with."""

UNLIMITED = 2**31 - 1
"""The size limit of a worker whose memory is not known to limit it, in samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """The fractions of its processors and memory that a worker can have; 1 without a limit, or if unknown."""

    cpu_availability: float = 1.0
    memory_availability: float = 1.0


# Values made for each worker and iteration are named tuples, which take half as long as frozen dataclasses.


class Sample(NamedTuple):
    """One worker's measured iteration: `compute_seconds` of pure compute for `samples` training samples.

    `samples` is a float because a predictor behind a time model with a fixed part counts that part as samples too.
    """

    samples: float
    compute_seconds: float
    factors: Factors = Factors()


class Prediction(NamedTuple):
    """Predicted `seconds_per_sample` (> 0, finite) and its relative standard error (0.05: five per cent)."""

    seconds_per_sample: float
    relative_error: float


class Estimate(NamedTuple):
    """What one worker tells the others about itself: x samples take fixed + max(x, flat) * per-sample nanoseconds.

    `error_ppm` is the relative standard error of that time in millionths; `nanoseconds_per_sample` is 0 as long as
    nothing is known; `flat_size` is the number of samples up to which more of them cost nothing, 0 for no flat start.
    """

    nanoseconds_per_sample: int = 0
    fixed_nanoseconds: int = 0
    error_ppm: int = 0
    flat_size: int = 0


class Reports(NamedTuple):
    """The same iteration as every worker reports it: int64 arrays of shape [workers]."""

    samples: IntArray
    compute_microseconds: IntArray
    nanoseconds_per_sample: IntArray
    fixed_nanoseconds: IntArray
    error_ppm: IntArray
    flat_size: IntArray
    largest_size: IntArray

    @classmethod
    def columns(cls) -> int:
        """How many integers one worker reports."""
        return len(cls._fields)

    @classmethod
    def from_table(cls, table: IntArray) -> Self:
        """From a [workers, columns] table, columns in the order of the fields."""
        return cls._make(table.T)

    def row(self, worker: int) -> list[int]:
        """One worker's integers, in the order of the fields."""
        return [int(column[worker]) for column in self]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """What sizes must satisfy: sum = `global_batch_size`, `minimum` <= size <= `maximum`, multiples of `multiple`.

    `minimum` and `maximum` have shape [workers], in samples, and must not be written to: what follows from a problem is
    kept with it. `epoch` is the epoch that the sizes are for.
    """

    global_batch_size: int
    minimum: IntArray
    maximum: IntArray
    multiple: int = 1
    epoch: int = 0

    @property
    def workers(self) -> int:
        """How many workers share the batch."""
        return len(self.minimum)


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Who computes how much: `sizes` has shape [workers], in samples, and sums to the global batch exactly.

    No estimator learns from an iteration whose `basis` is `comparison`, so later sizes are what they would have been
    without it. `why` is a sentence about a choice of the policy, the same as long as the choice holds; empty without.
    """

    sizes: IntArray
    basis: Basis = "speed"
    why: str = ""
