"""Batch sizes that follow the speeds of the last epoch and stay the same within an epoch: DBS."""

from dataclasses import dataclass, field
from typing import ClassVar, final

import numpy as np

from evenstep.core.load.base import Load, LoadPolicy
from evenstep.core.load.equal import equal_sizes
from evenstep.core.load.shares import shares_of
from evenstep.core.values import Allocation, IntArray, Problem, Reports


@final
@dataclass(slots=True)
class PerEpochPolicy(LoadPolicy):
    """DBS (arXiv 2007.11831): x_i = X * p_i / sum(p), with p_i = d_i / t_i of the last epoch; equal in the first one.

    d_i is a worker's share of the data and t_i its pure compute time in that epoch, summed over the iterations. Here
    d_i is the sum of the samples that t_i was measured on: the same up to a constant that cancels out, and still right
    for a short last slice, an epoch resumed in the middle, and measurements that arrive late. An epoch ends when sizes
    are requested for another epoch. A worker that reported nothing in an epoch keeps its performance. Sizes are equal
    until every worker has one.

    Deviations: the published rounding loses samples; here it is by largest remainder, and the sum is exact. The
    published code has no limits; here sizes keep the problem's. The performance is remembered, not the sizes, so a new
    global batch or memory limit takes effect at once.
    """

    _epoch: int | None = field(init=False, default=None)
    # Totals of an epoch, [workers, 2]: samples and the microseconds of pure compute that they took.
    _present: IntArray = field(init=False, default_factory=lambda: np.zeros((0, 2), dtype=np.int64))
    _last: IntArray = field(init=False, default_factory=lambda: np.zeros((0, 2), dtype=np.int64))

    def observe(self, reports: Reports) -> None:
        """Take in one iteration; reports without samples or time are ignored."""
        measured = np.stack((reports.samples, reports.compute_microseconds), axis=1)
        self._count(len(measured))
        self._present += np.where((measured > 0).all(axis=1, keepdims=True), measured, 0)

    def allocate(self, problem: Problem) -> Allocation:
        """The sizes of the problem's epoch; ConfigError if no sizes satisfy the problem's limits."""
        self._count(problem.workers)
        if problem.epoch != self._epoch:
            self._last = np.where(self._present > 0, self._present, self._last)
            self._present = np.zeros_like(self._present)
            self._epoch = problem.epoch
        if not self._last.all():
            return Allocation(sizes=equal_sizes(problem), basis="start")
        speeds = self._last[:, 0] / self._last[:, 1]
        performance = np.maximum((speeds * (2.0**50 / speeds.max())).astype(np.int64), 1)
        return Allocation(sizes=shares_of(problem, performance))

    def _count(self, workers: int) -> None:
        """Forget everything if the number of workers has changed."""
        if len(self._last) != workers:
            self._present, self._last = np.zeros((2, workers, 2), dtype=np.int64)


@final
@dataclass(frozen=True, kw_only=True)
class PerEpoch(Load):
    """DBS: sizes in proportion to the last epoch's speeds, the same for a whole epoch."""

    by_epoch: ClassVar[bool] = True

    def policy(self, workers: int) -> LoadPolicy:
        return PerEpochPolicy()
