"""Sizes with which all workers finish earliest, by a line through each worker's times: LB-BSP's problem for GPUs."""

from dataclasses import dataclass, field, replace
from typing import final

import numpy as np

from evenstep.core.load.base import LoadPolicy
from evenstep.core.load.equal import equal_sizes
from evenstep.core.load.shares import in_multiples, share_out
from evenstep.core.values import Allocation, FloatArray, IntArray, Problem, Reports


@final
@dataclass(slots=True)
class TimeModelsPolicy(LoadPolicy):
    """Sizes that minimise the largest t_i(x_i) = fixed_i + slope_i * x_i, from the latest iterations' times.

    LB-BSP for GPU clusters (arXiv 1806.02508, section on non-linear times) profiles each device beforehand, with a flat
    start. Here a least-squares line goes through a worker's last `window` times. Until its sizes have differed, its
    time counts as proportional to the size. The fixed part is limited to ten times the rest: speeds that change with
    the sizes look like one. Every new solution is applied, as in the paper. The solver, a bisection, is ours.

    Args:
        workers: The number of workers.
        window: The number of iterations per line, 2 or more.
        warmup: The number of first iterations that are not counted.
    """

    workers: int
    window: int = 32
    warmup: int = 1
    _window: list[IntArray] = field(init=False, default_factory=list)  # Samples and microseconds, [2, workers] each.
    _seen: int = field(init=False, default=0)

    def observe(self, reports: Reports) -> None:
        """Take in one iteration; it counts if every worker has samples and a time."""
        row = np.array((reports.samples, reports.compute_microseconds))
        if not row.all():
            return
        self._seen += 1
        if self._seen > self.warmup:
            self._window = [*self._window, row][-self.window :]

    def allocate(self, problem: Problem) -> Allocation:
        if not self._window or self.workers != problem.workers:
            return Allocation(sizes=equal_sizes(problem), basis="start")
        return Allocation(sizes=solve(*_lines(self._window), in_multiples(problem)))


def _lines(window: list[IntArray]) -> tuple[FloatArray, FloatArray]:
    """The fixed part and the slope of each worker's time, in microseconds; the same on every processor."""
    x, t = np.array(window).transpose(1, 0, 2)
    count, sx, st = len(window), x.sum(axis=0), t.sum(axis=0)
    spread = count * (x * x).sum(axis=0) - sx * sx
    slope, usual = (count * (x * t).sum(axis=0) - sx * st) / np.maximum(spread, 1), st / sx
    # At least an 11th of a slope in proportion: the fixed part is then ten times the rest.
    slope = np.where(spread > 0, np.minimum(np.maximum(slope, 1.0 / 11.0 * usual), usual), usual)
    return np.maximum((st - slope * sx) / count, 0.0), slope


def solve(fixed: FloatArray, slope: FloatArray, limits: Problem) -> IntArray:
    """Sizes in samples that minimise the largest fixed + slope * x, int64 of shape [workers]; limits are in multiples.

    Bisects for the least time in which the workers' largest sizes sum to the global batch. Any excess at that time is
    taken from all workers in proportion.
    """

    def within(time: float) -> IntArray:
        sizes = np.minimum((time - fixed) / (slope * limits.multiple), float(limits.global_batch_size))
        return np.minimum(np.maximum(sizes.astype(np.int64), limits.minimum), limits.maximum)

    low, high = 0.0, float((fixed + slope * limits.multiple * limits.global_batch_size).max())
    while (middle := (low + high) / 2.0) not in (low, high):
        low, high = (low, middle) if int(within(middle).sum()) >= limits.global_batch_size else (middle, high)
    most, fewer = within(high), within(low)
    return share_out(replace(limits, minimum=np.minimum(fewer, most), maximum=most), most)
