"""The values that pass between the parts: observations, problems and decisions.

Arrays have one element per worker, by rank. Values from which several workers must decide alike are integers, so that
processors cannot round them differently.
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
BoolArray: TypeAlias = npt.NDArray[np.bool_]
State: TypeAlias = dict[str, object]
"""A checkpoint: plain numbers, strings, lists and dicts, so that JSON can hold it."""

Basis: TypeAlias = Literal["speed", "start"]
"""Reason for the sizes: decided, or equal because no speeds are known yet."""

UNLIMITED = 2**31 - 1
"""The size limit, in samples, of a worker without a known memory limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """The fractions of processors and memory that are available to a worker; 1 without a limit, or if unknown."""

    cpu_availability: float = 1.0
    memory_availability: float = 1.0


# Values made for each worker and iteration are named tuples, which take half as long as frozen dataclasses.


class Sample(NamedTuple):
    """One worker's measured iteration: `compute_seconds` of pure compute for `samples` training samples.

    `samples` need not be a whole number if samples differ in cost.
    """

    samples: float
    compute_seconds: float


class Reports(NamedTuple):
    """All workers' reports about the same iteration: int64 arrays of shape [workers].

    `forecast` is a worker's own expectation for its next iteration, in nanoseconds per sample; 0 without a forecast.
    """

    samples: IntArray
    compute_microseconds: IntArray
    forecast: IntArray
    largest_size: IntArray

    @classmethod
    def columns(cls) -> int:
        """The number of integers that one worker reports."""
        return len(cls._fields)

    @classmethod
    def from_table(cls, table: IntArray) -> Self:
        """Make from a [workers, columns] table, with columns in the order of the fields."""
        return cls._make(table.T)

    def row(self, worker: int) -> list[int]:
        """One worker's integers, in the order of the fields."""
        return [int(column[worker]) for column in self]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """The conditions for sizes: sum = `global_batch_size`, `minimum` <= size <= `maximum`, multiples of `multiple`.

    `minimum` and `maximum` have shape [workers], in samples, and must not be written to, because results are cached per
    problem. `epoch` is the epoch that the sizes are for.
    """

    global_batch_size: int
    minimum: IntArray
    maximum: IntArray
    multiple: int = 1
    epoch: int = 0

    @property
    def workers(self) -> int:
        """The number of workers that share the batch."""
        return len(self.minimum)


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """The decided sizes: `sizes` has shape [workers], in samples, and sums to the global batch exactly.

    The sizes are in proportion to `weights`, apart from limits and rounding; None if to nothing.
    """

    sizes: IntArray
    basis: Basis = "speed"
    weights: IntArray | None = None


def plain(value: object) -> object:
    """Convert a whole number or truth value of any kind, such as NumPy's, to Python's; keep other values."""
    try:
        return bool(value) if isinstance(value, bool | np.bool_) else index(value)  # type: ignore[arg-type]
    except TypeError:
        return value


def require_whole(name: str, value: object, least: int, most: int) -> int:
    """Return the argument of this name as an int.

    Raises:
        ConfigError: It is not a whole number in this range.
    """
    number = plain(value)
    if not isinstance(number, int) or isinstance(number, bool) or not least <= number <= most:
        raise ConfigError(f"{name} must be a whole number from {least} to {most}, not {shown(value)}")
    return number
