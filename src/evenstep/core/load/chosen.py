"""Sizes of the scheme that costs least on these workers: equal, at every iteration, or by epoch."""

from dataclasses import dataclass, field
from typing import Final, final

import numpy as np

from evenstep.core.load.base import Load, LoadPolicy
from evenstep.core.load.equal import equal_sizes
from evenstep.core.load.estimate import Estimator
from evenstep.core.load.per_epoch import PerEpochPolicy
from evenstep.core.load.predicted import Predicted
from evenstep.core.values import Allocation, IntArray, Problem, Reports

WARM_UP: Final = 50
"""Iterations that a choice rests on at least; it waits for the end of the epoch in which there are as many."""
WORTH_PERCENT: Final = 2
"""A smaller gain over equal sizes, or over the present choice, is not worth another scheme."""
EQUAL, BALANCED, BY_EPOCH = range(3)
NAMES: Final = ("bsp", "lb-bsp", "dbs")

_PPM: Final = 1_000_000
_MOST_NANOSECONDS: Final = 9 * 10**12
"""2.5 hours: in millionths, it still fits in 64 bits."""


@final
@dataclass(slots=True)
class ChosenPolicy(LoadPolicy):
    """Follows one of three policies, and looks at the end of an epoch which of them it should be.

    It begins with those of `balanced`, as lb-bsp. All three see every report and decide in every iteration; the sizes
    of one are used. What an iteration would have taken with the sizes of another follows from each worker's measured
    time and its time model: t * (fixed + x' * pace) / (fixed + x * pace). The longest of the workers' times is added up
    for each policy. When sizes for another epoch are asked for and 50 iterations have been added up, the policy with
    the least time is chosen, if it takes 2 % less than equal sizes, and 2 % less than the present one; else equal
    sizes are. Then the sums begin at 0.

    All of it is decided from the reported integers, in integers, so that all workers choose alike.
    """

    _balanced: LoadPolicy
    _by_epoch: PerEpochPolicy = field(init=False, default_factory=PerEpochPolicy)
    _chosen: int = field(init=False, default=BALANCED)
    _why: str = field(init=False, default="")
    _epoch: int | None = field(init=False, default=None)
    _iterations: int = field(init=False, default=0)
    _microseconds: list[int] = field(init=False, default_factory=lambda: [0, 0, 0])
    _planned: list[IntArray] = field(init=False, default_factory=list)  # By policy.

    def observe(self, reports: Reports) -> None:
        self._balanced.observe(reports)
        self._by_epoch.observe(reports)
        measured = (reports.samples > 0) & (reports.compute_microseconds > 0) & (reports.nanoseconds_per_sample > 0)
        # Reports of an epoch's short last slice, or of other workers, are of other sizes than those planned.
        whole = bool(self._planned) and len(self._planned[0]) == len(measured)
        if not whole or not measured.all() or self._planned[0].sum() != reports.samples.sum():
            return
        usual = _nanoseconds(reports, reports.samples)
        for policy, sizes in enumerate(self._planned):
            ratios = _nanoseconds(reports, sizes) * _PPM // usual
            self._microseconds[policy] += int((reports.compute_microseconds * ratios).max()) // _PPM
        self._iterations += 1

    def allocate(self, problem: Problem) -> Allocation:
        if problem.epoch != self._epoch:
            self._choose()
            self._epoch = problem.epoch
        balanced, by_epoch = self._balanced.allocate(problem), self._by_epoch.allocate(problem)
        self._planned = [equal_sizes(problem), balanced.sizes, by_epoch.sizes]
        return Allocation(sizes=self._planned[self._chosen], why=self._why)

    def _choose(self) -> None:
        if self._iterations < WARM_UP:
            return
        equal, present = self._microseconds[EQUAL], self._microseconds[self._chosen]
        best = min((BALANCED, BY_EPOCH), key=self._microseconds.__getitem__)
        if not _worth(equal, self._microseconds[best]):
            best = EQUAL
        elif _worth(equal, present) and not _worth(present, self._microseconds[best]):
            best = self._chosen
        self._chosen = best
        ratios = [100 * equal // max(spent, 1) for spent in self._microseconds]
        gains = " and ".join(f"{NAMES[each]} {ratios[each] - 100:+d} %" for each in (BALANCED, BY_EPOCH))
        self._why = (
            f"auto uses {NAMES[best]}: in the last {self._iterations} iterations, {gains} samples/s of compute over bsp"
        )
        self._iterations, self._microseconds = 0, [0, 0, 0]


def _worth(before: int, after: int) -> bool:
    return after * (100 + WORTH_PERCENT) <= before * 100


def _nanoseconds(reports: Reports, sizes: IntArray) -> IntArray:
    """What the workers' time models say for these sizes."""
    counted = np.maximum(sizes, reports.flat_size)
    return np.clip(reports.fixed_nanoseconds + counted * reports.nanoseconds_per_sample, 1, _MOST_NANOSECONDS)


@final
@dataclass(frozen=True, kw_only=True)
class Chosen(Load):
    """Sizes of `bsp`, `lb-bsp` or `dbs`, whichever costs least."""

    def policy(self, workers: int) -> LoadPolicy:
        return ChosenPolicy(self._predicted.policy(workers))

    def estimator(self) -> Estimator:
        return self._predicted.estimator()

    @property
    def _predicted(self) -> Predicted:
        return Predicted(times="affine", minimum=self.minimum, maximum=self.maximum, multiple=self.multiple)
