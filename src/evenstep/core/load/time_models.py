"""The sizes with which all workers finish earliest, by a line through each one's times: LB-BSP's problem for GPUs."""

from dataclasses import dataclass, field
from typing import Final, final

import numpy as np

from evenstep.core.errors import ConfigError
from evenstep.core.load.base import Load, LoadPolicy
from evenstep.core.load.equal import equal_sizes
from evenstep.core.load.shares import Bounds, share_out
from evenstep.core.values import Allocation, FloatArray, IntArray, Problem, Reports

_LEAST_SLOPE: Final = 1.0 / 11.0


@final
@dataclass(slots=True)
class TimeModelsPolicy(LoadPolicy):
    """Sizes that minimise the largest t_i(x_i) = fixed_i + slope_i * x_i, from the latest iterations' times.

    LB-BSP for GPU clusters (arXiv 1806.02508, section on non-linear times) profiles each device beforehand, with a flat
    start. Here a least-squares line through a worker's last `window` times serves. Until its sizes have differed, its
    time is in proportion to the size. The fixed part is between 0 and ten times the rest: speeds that change with the
    sizes look like a fixed part. Every new solution is applied, as in the paper. The solver, a bisection, is ours.
    """

    config: "TimeModels"
    _window: list[IntArray] = field(init=False, default_factory=list)  # Samples and microseconds, [2, workers] each.
    _seen: int = field(init=False, default=0)

    def observe(self, reports: Reports) -> None:
        """Take in one iteration; it counts if every worker has samples and a time."""
        row = np.array((reports.samples, reports.compute_microseconds))
        if not row.all():
            return
        self._seen += 1
        if self._seen > self.config.warmup:
            same = self._window and self._window[-1].shape == row.shape
            self._window = [*(self._window if same else ()), row][-self.config.window :]

    def allocate(self, problem: Problem) -> Allocation:
        if not self._window or self._window[-1].shape[1] != problem.workers:
            return Allocation(sizes=equal_sizes(problem), basis="start")
        return Allocation(sizes=solve(*_lines(self._window), Bounds.of_problem(problem)))


def _lines(window: list[IntArray]) -> tuple[FloatArray, FloatArray]:
    """The fixed part and the slope of each worker's time, in microseconds; alike on every processor."""
    x, t = np.array(window).transpose(1, 0, 2)
    count, sx, st = len(window), x.sum(axis=0), t.sum(axis=0)
    spread = count * (x * x).sum(axis=0) - sx * sx
    slope, usual = (count * (x * t).sum(axis=0) - sx * st) / np.maximum(spread, 1), st / sx
    slope = np.where(spread > 0, np.minimum(np.maximum(slope, _LEAST_SLOPE * usual), usual), usual)
    return np.maximum((st - slope * sx) / count, 0.0), slope


def solve(fixed: FloatArray, slope: FloatArray, bounds: Bounds) -> IntArray:
    """Sizes within the bounds with the smallest possible largest fixed + slope * x, in samples, int64 of [workers].

    Bisects for the least time in which the workers' largest sizes sum to the global batch. What is too much at that
    time is taken from all workers in proportion.
    """

    def within(time: float) -> IntArray:
        sizes = np.minimum((time - fixed) / (slope * bounds.multiple), float(bounds.units))
        return np.minimum(np.maximum(sizes.astype(np.int64), bounds.lower), bounds.upper)

    low, high = 0.0, float((fixed + slope * bounds.multiple * bounds.units).max())
    while (middle := (low + high) / 2.0) not in (low, high):
        low, high = (low, middle) if int(within(middle).sum()) >= bounds.units else (middle, high)
    most, fewer = within(high), within(low)
    left = Bounds(units=bounds.units, lower=np.minimum(fewer, most), upper=most, multiple=bounds.multiple)
    return share_out(left, most)


@final
@dataclass(frozen=True, kw_only=True)
class TimeModels(Load):
    """LB-BSP for GPU clusters: sizes solved from a line through each worker's times.

    Attributes:
        window: How many iterations a line rests on.
        warmup: How many iterations are not counted at first.
    """

    window: int = 32
    warmup: int = 1

    def __post_init__(self) -> None:
        Load.__post_init__(self)
        if self.window < 2 or self.warmup < 0:
            raise ConfigError(
                f"no line rests on {self.window} iterations after {self.warmup}: use window >= 2, warmup >= 0"
            )

    def policy(self, workers: int) -> LoadPolicy:
        return TimeModelsPolicy(self)
