"""Emulated devices: another machine's speed and memory."""

import tomllib
from bisect import bisect_left
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import pairwise
from operator import itemgetter
from statistics import linear_regression
from typing import Annotated, Final, Self, TypeAlias, final

from evenstep.cluster.record import (
    CAPACITY,
    DURATION,
    FROM_ONE,
    NOT_NEGATIVE,
    POSITIVE,
    WHOLE,
    Listed,
    Number,
    Pair,
    require_ranges,
)
from evenstep.cluster.slowness.base import NO_SLOWNESS, Slowness
from evenstep.core.errors import ConfigError
from evenstep.core.nearest import nearest
from evenstep.core.values import UNLIMITED

FIT_FROM: Final = 16
"""The batch size, in samples, from which a device is assumed to be filled, so that its time grows along a line."""

MEASURED_CURVES: Final[dict[str, tuple[tuple[int, float], ...]]] = {
    name: tuple(enumerate(milliseconds, start=2))
    for name, milliseconds in tomllib.loads(files(__package__).joinpath("measured.toml").read_text("utf-8")).items()
}
"""Points (batch size in samples, milliseconds) in ascending order of size, by the name of the device."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AffineCurve:
    """`fixed_seconds` + max(batch size, `flat_size`) * `seconds_per_sample`.

    Attributes:
        fixed_seconds: The part that is independent of the batch size, >= 0.
        seconds_per_sample: The slope, >= 0.
        flat_size: Samples up to which the device is not filled and the time does not grow, >= 0.

    Raises:
        ConfigError: A value lies outside its range, or an iteration could take no time at all.

    >>> AffineCurve(fixed_seconds=0.25, seconds_per_sample=0.5, flat_size=8).seconds(2)
    4.25
    """

    fixed_seconds: Annotated[float, "fixed", DURATION, NOT_NEGATIVE] = 0.0
    seconds_per_sample: Annotated[float, "per_sample", DURATION, NOT_NEGATIVE]
    flat_size: Annotated[int, "flat", WHOLE] = 0

    def __post_init__(self) -> None:
        require_ranges(self)
        if self.seconds(1) <= 0:
            raise ConfigError("the fixed part and the time per sample must not both be 0")

    def seconds(self, batch_size: float) -> float:
        return self.fixed_seconds + max(batch_size, self.flat_size) * self.seconds_per_sample


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PointCurve:
    """Measured points joined by straight lines.

    Below the first point the time stays at the first point's, because a small batch does not fill a device. Beyond the
    last point the time follows the least-squares line through the points from `fit_from` up, at least the last two.

    Attributes:
        points: At least two pairs (batch size >= 1, seconds > 0), in strictly ascending order of size.
        fit_from: The smallest batch size that the line is fitted to, in samples; smaller ones do not fill the device.

    Raises:
        ConfigError: A value lies outside its range, or the line falls, so that a large batch would take no time.

    >>> curve = PointCurve(points=((2, 0.25), (4, 0.75)))
    >>> curve.seconds(1), curve.seconds(3), curve.seconds(6)
    (0.25, 0.5, 1.25)
    """

    points: Annotated[
        tuple[tuple[int, float], ...], Listed(Pair(rules=(FROM_ONE, DURATION), example='[16, "30.5 ms"]'))
    ]
    fit_from: Annotated[int, FROM_ONE] = FIT_FROM
    _slope: float = field(init=False, repr=False, compare=False)
    _intercept: float = field(init=False, repr=False, compare=False)

    @classmethod
    def measured(cls, name: str, *, fit_from: int = FIT_FROM) -> Self:
        """The built-in measured curve of this name; ConfigError if there is none."""
        if name not in MEASURED_CURVES:
            raise ConfigError(f"no measured curve is called {name!r}; {nearest(name, MEASURED_CURVES)}")
        points = tuple((size, milliseconds / 1000) for size, milliseconds in MEASURED_CURVES[name])
        return cls(points=points, fit_from=fit_from)

    def __post_init__(self) -> None:
        require_ranges(self)
        if len(self.points) < 2:
            raise ConfigError(f"points must hold at least two points, not {len(self.points)}")
        for at, (size, seconds) in enumerate(self.points):
            FROM_ONE.read(f"points[{at}][0]", size)
            POSITIVE.read(f"points[{at}][1]", seconds)
        for before, after in pairwise(self.points):
            if after[0] <= before[0]:
                raise ConfigError(f"points must be in rising order of batch size, not {after[0]} after {before[0]}")
        first = min(bisect_left(self.points, self.fit_from, key=itemgetter(0)), len(self.points) - 2)
        sizes, times = zip(*self.points[first:], strict=True)
        line = linear_regression(sizes, times)
        if line.slope < 0:
            raise ConfigError(
                f"points from batch size {sizes[0]} up take less time the larger the batch; measure larger batches"
            )
        object.__setattr__(self, "_slope", line.slope)
        object.__setattr__(self, "_intercept", line.intercept)

    def seconds(self, batch_size: float) -> float:
        if batch_size > self.points[-1][0]:
            return self._intercept + self._slope * batch_size
        at = bisect_left(self.points, batch_size, key=itemgetter(0))
        size, seconds = self.points[at]
        if at == 0 or size == batch_size:
            return seconds
        size_before, seconds_before = self.points[at - 1]
        return seconds_before + (seconds - seconds_before) * (batch_size - size_before) / (size - size_before)


TimeCurve: TypeAlias = AffineCurve | PointCurve
"""The seconds (> 0) of an iteration on a device as a function of its samples (>= 0)."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """A memory of `capacity_bytes`, of which a batch takes `fixed_bytes` plus `bytes_per_sample` per sample.

    Raises:
        ConfigError: Not even one sample fits, or a number is out of range.
    """

    capacity_bytes: Annotated[int, "memory", CAPACITY, WHOLE]
    fixed_bytes: Annotated[int, "memory_fixed", CAPACITY, WHOLE] = 0
    bytes_per_sample: Annotated[int, "memory_per_sample", CAPACITY, FROM_ONE]

    def __post_init__(self) -> None:
        require_ranges(self)
        if self.largest_batch < 1:
            raise ConfigError(
                f"a memory of {self.capacity_bytes} bytes holds no sample: raise memory, or lower memory_fixed or"
                " memory_per_sample"
            )

    def peak_bytes(self, batch_size: int) -> int:
        """The memory that a batch of this size takes, in bytes."""
        return self.fixed_bytes + self.bytes_per_sample * batch_size

    @property
    def largest_batch(self) -> int:
        """The number of samples that fit."""
        return (self.capacity_bytes - self.fixed_bytes) // self.bytes_per_sample


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device on which a batch takes the seconds given by `curve` instead of the natural seconds.

    Attributes:
        curve: The seconds as a function of the batch size.
        largest_batch: The samples that its memory is known to hold, from 1 to UNLIMITED. A larger batch is not refused
            here, and its time also follows the curve.
        memory: A memory whose limit is learned from the memory that batches take; None: there is none.
        change_seconds: Additional seconds of the first batch of a size, such as compilation, >= 0.

    Raises:
        ConfigError: A value lies outside its range.
    """

    curve: TimeCurve
    largest_batch: Annotated[int, Number(whole=True, least=1, most=UNLIMITED)] = UNLIMITED
    memory: DeviceMemory | None = None
    change_seconds: Annotated[float, "change", DURATION, NOT_NEGATIVE] = 0.0

    def __post_init__(self) -> None:
        require_ranges(self)

    def seconds(self, *, worker: int, iteration: int, batch_size: float, natural_seconds: float) -> float:
        return self.curve.seconds(batch_size)

    def slowness(self, before: Slowness, *, worker: int, iteration: int) -> Slowness:
        return NO_SLOWNESS
