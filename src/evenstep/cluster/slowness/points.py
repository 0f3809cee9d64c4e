"""A device whose time was measured at some batch sizes."""

from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from statistics import linear_regression
from typing import Final, Self, final

from evenstep.cluster.slowness.measured import MEASURED_CURVES
from evenstep.cluster.slowness.require import require_at_least, require_positive
from evenstep.core.errors import ConfigError
from evenstep.core.nearest import nearest

FIT_FROM: Final = 16
"""The batch size, in samples, from which a device is taken to be filled and its time to grow along a line."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PointCurve:
    """Measured points, with straight lines between them.

    Below the first point its time holds, because a small batch does not fill a device. Beyond the last point the time
    follows the least-squares line through the points from `fit_from` up, and through the last two at least.

    Attributes:
        points: At least two pairs (batch size >= 1, seconds > 0), in strictly rising order of size.
        fit_from: The smallest batch size that the line is fitted to, in samples; smaller ones do not fill the device.

    Raises:
        ConfigError: A value lies outside its range, or the line falls, so that a large batch would take no time.

    >>> curve = PointCurve(points=((2, 0.25), (4, 0.75)))
    >>> curve.seconds(1), curve.seconds(3), curve.seconds(6)
    (0.25, 0.5, 1.25)
    """

    points: tuple[tuple[int, float], ...]
    fit_from: int = FIT_FROM
    _slope: float = field(init=False, repr=False, compare=False)
    _intercept: float = field(init=False, repr=False, compare=False)

    @classmethod
    def measured(cls, name: str, *, fit_from: int = FIT_FROM) -> Self:
        """The built-in measured curve of that name; ConfigError if there is none."""
        if name not in MEASURED_CURVES:
            raise ConfigError(f"no measured curve is called {name!r}; {nearest(name, MEASURED_CURVES)}")
        points = tuple((size, milliseconds / 1000) for size, milliseconds in MEASURED_CURVES[name])
        return cls(points=points, fit_from=fit_from)

    def __post_init__(self) -> None:
        """Refuse values outside their ranges, and fit the line."""
        if len(self.points) < 2:
            raise ConfigError(f"points must hold at least two points, not {len(self.points)}")
        for size, seconds in self.points:
            require_at_least("each batch size of points", size, 1)
            require_positive("each time of points", seconds)
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
        # A frozen value has no other way to keep what follows from its fields; the line is not asked for per iteration.
        object.__setattr__(self, "_slope", line.slope)
        object.__setattr__(self, "_intercept", line.intercept)

    def seconds(self, batch_size: int) -> float:
        """The seconds of one iteration with `batch_size` samples, from 0."""
        if batch_size > self.points[-1][0]:
            return self._intercept + self._slope * batch_size
        at = bisect_left(self.points, batch_size, key=itemgetter(0))
        size, seconds = self.points[at]
        if at == 0 or size == batch_size:
            return seconds
        size_before, seconds_before = self.points[at - 1]
        return seconds_before + (seconds - seconds_before) * (batch_size - size_before) / (size - size_before)
