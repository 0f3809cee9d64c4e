"""The values that pass between the parts: what was observed, what is asked, what was decided.

Arrays have one element per worker, by rank. Values from which several workers must decide alike are integers, so that
no two processors round them differently.
"""

from dataclasses import dataclass
from operator import index
from typing import Literal, NamedTuple, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from evenstep.core.errors import ConfigError
from evenstep.core.shown import shown

IntArray: TypeAlias = npt.NDArray[np.int64]
FloatArray: TypeAlias = npt.NDArray[np.float64]
State: TypeAlias = dict[str, object]
"""A checkpoint: plain numbers, strings, lists and dicts, so that JSON can hold it."""

Basis: TypeAlias = Literal["speed", "start"]
"""Reason for the sizes: decided, or equal because no speeds are known yet."""

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

    `samples` need not be whole where samples differ in cost.
    """

    samples: float
    compute_seconds: float


class Reports(NamedTuple):
    """The same iteration as every worker reports it: int64 arrays of shape [workers].

    `forecast` is what a worker itself expects of its next iteration, in nanoseconds per sample; 0 where it forecasts
    nothing.
    """

    samples: IntArray
    compute_microseconds: IntArray
    forecast: IntArray
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

    `weights` are what the sizes are in proportion to, apart from limits and rounding; None if to nothing.
    """

    sizes: IntArray
    basis: Basis = "speed"
    weights: IntArray | None = None


def plain(value: object) -> object:
    """A whole number or a truth value of any kind, such as NumPy's, as Python's; other values as they are."""
    try:
        return bool(value) if isinstance(value, bool | np.bool_) else index(value)  # type: ignore[arg-type]
    except TypeError:
        return value


def require_whole(name: str, value: object, least: int, most: int) -> int:
    """The argument of this name as an int.

    Raises:
        ConfigError: It is not a whole number in this range.
    """
    number = plain(value)
    if not isinstance(number, int) or isinstance(number, bool) or not least <= number <= most:
        raise ConfigError(f"{name} must be a whole number from {least} to {most}, not {shown(value)}")
    return number
