"""The values that pass between the parts: what was observed, what is asked, what was decided.

Arrays run over all workers, worker i at index i. Everything that several workers must decide alike from is an integer,
so that no two processors round it differently.
"""

from dataclasses import dataclass, fields
from typing import Literal, NamedTuple, Self, TypeAlias

import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = npt.NDArray[np.int64]
State: TypeAlias = dict[str, object]
"""A checkpoint: plain numbers, strings, lists and dicts, so that JSON can hold it."""

Basis: TypeAlias = Literal["speed", "start", "comparison"]
"""Why sizes are what they are: decided (from speeds, or once for all); equal because no speeds are known yet; or equal
for a few iterations, to compare the decided sizes with."""

UNLIMITED = 2**31 - 1
"""The size limit of a worker whose memory is not known to limit it, in samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """What is known about a worker before its iteration: the shares of its processors and memory that it can have.

    Each from 0 to 1; 1 where nothing limits it, or where nothing is known.
    """

    cpu_availability: float = 1.0
    memory_availability: float = 1.0


# What is made anew for each worker and iteration is a named tuple, which takes half as long as a frozen dataclass.


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Reports:
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
        return len(fields(cls))

    @classmethod
    def from_table(cls, table: IntArray) -> Self:
        """From a [workers, columns] table, columns in the order of the fields."""
        return cls(**{f.name: table[:, i] for i, f in enumerate(fields(cls))})

    def row(self, worker: int) -> list[int]:
        """One worker's integers, in the order of the fields."""
        return [int(getattr(self, f.name)[worker]) for f in fields(self)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What sizes must satisfy: sum = `global_batch_size`, `minimum` <= size <= `maximum`, multiples of `multiple`.

    `minimum` and `maximum` have shape [workers], in samples; `epoch` is the epoch that the sizes are for.
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
    without it.
    """

    sizes: IntArray
    basis: Basis = "speed"
