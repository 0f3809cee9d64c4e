"""A few iterations with equal sizes now and then, so that the gain of other sizes is measured."""

from dataclasses import dataclass, field
from typing import Final, final

import numpy as np
import numpy.typing as npt

from evenstep.core.load.base import LoadPolicy
from evenstep.core.load.equal import equal_sizes
from evenstep.core.values import Allocation, IntArray, Problem, Reports

START_ITERATIONS: Final = 5
"""Iterations at the start of a run that have equal sizes, the first of which only warms up."""
BLOCK_ITERATIONS: Final = 3
"""Iterations of a later comparison."""
COST_SHARE: Final = 200
"""Later comparisons take at most this part (one in 200, 0.5 %) of the run's compute time."""
FIRST_COST_SHARE: Final = 50
"""As `COST_SHARE`, for the first of them: 2 % of the run's compute time so far."""

_SETTLED: Final = 20
_APART: Final = 100
_UNEVEN: Final = 8
_CHANGED: Final = 4


@final
@dataclass(slots=True)
class _Times:
    """Iterations, and the sum of their microseconds."""

    iterations: int = 0
    microseconds: int = 0

    def add(self, microseconds: int) -> None:
        self.iterations += 1
        self.microseconds += microseconds

    @property
    def mean(self) -> int:
        return self.microseconds // max(self.iterations, 1)


@final
@dataclass(slots=True)
class ComparedPolicy(LoadPolicy):
    """Passes on what another policy decides, and gives equal sizes in a few iterations to compare it with.

    The first five iterations of a run are equal. Later ones come three in a row, if the decided sizes are uneven: after
    at least 100 iterations with decided sizes, or after 20 if a size has changed by more than a quarter since the last
    comparison. The cost of these later comparisons is the reported compute time beyond that of decided sizes. The next
    comparison waits until the cost so far and its expected cost together are at most 0.5 % of the run's compute time.
    The first may cost 2 % of the time so far, because sizes settle only after the start.

    The other policy sees every report, those of comparisons without their times, and the workers' estimators learn
    nothing from a comparison, so the decided sizes are those of a run without comparisons. Everything is decided from
    the reported integers, in integers, so that all workers decide alike.
    """

    _policy: LoadPolicy
    _count: int = field(init=False, default=0)  # Reports so far, up to the end of the start.
    _left: int = field(init=False, default=0)  # Iterations left of the present comparison.
    _decided: list[int] = field(init=False, default_factory=list)  # The latest sizes, if they are worth a comparison.
    _compared: list[int] = field(init=False, default_factory=list)  # Those at the last comparison.
    _usual: _Times = field(init=False, default_factory=_Times)  # Of iterations with decided sizes, since then.
    _equal: _Times = field(init=False, default_factory=_Times)  # Of the latest iterations with equal sizes.
    _elapsed: int = field(init=False, default=0)  # Microseconds of the whole run.
    _spent: int = field(init=False, default=0)  # Microseconds that comparisons have cost.

    def observe(self, reports: Reports) -> None:
        # The policy is to decide as without comparisons.
        self._policy.observe(_unmeasured(reports) if self._left else reports)
        longest = int(reports.compute_microseconds.max())
        self._elapsed += longest
        if self._count < START_ITERATIONS:
            self._count += 1
            if self._count > 1:
                self._equal.add(longest)
        elif self._left:
            self._compare(longest)
        elif self._decided:
            self._usual.add(longest)
            if self._due():
                self._left, self._compared, self._equal = BLOCK_ITERATIONS, self._decided, _Times()

    def allocate(self, problem: Problem) -> Allocation:
        decided = self._policy.allocate(problem)
        if problem.workers == 1:
            return decided
        equal = equal_sizes(problem)
        if self._count < START_ITERATIONS:
            return Allocation(sizes=equal, basis="start")
        worth = uneven(decided.sizes, equal) and int(np.ptp(equal)) <= problem.multiple
        self._decided = decided.sizes.tolist() if worth else []
        if not worth:
            self._left, self._usual = 0, _Times()
        return Allocation(sizes=equal, basis="comparison") if self._left else decided

    def _due(self) -> bool:
        """Whether a comparison is worth its cost now."""
        changed = len(self._compared) != len(self._decided) or any(
            abs(now - then) * _CHANGED > then for now, then in zip(self._decided, self._compared, strict=True)
        )
        if self._usual.iterations < (_SETTLED if changed else _APART):
            return False
        expected = BLOCK_ITERATIONS * max(self._equal.mean - self._usual.mean, 0)
        share = COST_SHARE if self._compared else FIRST_COST_SHARE
        return (self._spent + expected) * share <= self._elapsed

    def _compare(self, longest: int) -> None:
        """Count how much longer this iteration of a comparison took than a usual one."""
        self._equal.add(longest)
        self._spent += max(longest - self._usual.mean, 0)
        self._left -= 1
        if not self._left:
            self._usual = _Times()


def _unmeasured(reports: Reports) -> Reports:
    """The same without measured times."""
    return reports._replace(compute_microseconds=np.zeros_like(reports.compute_microseconds))


def uneven(sizes: IntArray | npt.NDArray[np.float64], equal: IntArray | float) -> bool:
    """Whether any size differs from its equal share by more than an eighth, so that the two are worth comparing."""
    return bool((np.abs(sizes - equal) * _UNEVEN > equal).any())
