"""Batch sizes that follow the speed of the last epoch, and stay for the whole of this one: DBS."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Final, cast, final

import numpy as np

from evenstep.core.errors import ConfigError
from evenstep.core.load.allocate.shares import shares
from evenstep.core.load.base import LoadPolicy
from evenstep.core.load.estimate import Estimator
from evenstep.core.load.predict import PREDICTORS
from evenstep.core.values import Allocation, IntArray, Problem, Reports, State

_WEIGHT_BITS: Final = 60


@final
class PerEpochPolicy:
    """DBS (arXiv 2007.11831): x_i = X * p_i / sum(p), with p_i = d_i / t_i of the epoch before; the first one is equal.

    d_i is a worker's share of the data and t_i its pure compute time of that epoch, summed over the iterations. Here
    d_i is the sum of the samples that t_i was measured on: the same up to a constant that falls out, and still right
    for a short last slice, an epoch resumed in the middle and measurements that arrive late. An epoch ends when sizes
    are asked for under another epoch number. A worker that reported nothing in an epoch keeps its performance; until
    every worker has one, sizes are equal.

    Deviations: the published rounding gives a missing sample only to a remainder of at least one half and so loses
    some; here it is the largest remainder, and the sum is exact. The published code knows no limits; here sizes keep
    the problem's.

    What is remembered is the performance, not the sizes, so that another global batch (an epoch's last slice) or a new
    memory limit is shared out at once and leaves nothing behind.
    """

    __slots__ = ("_epoch", "_last", "_present")

    def __init__(self) -> None:
        self._epoch: int | None = None
        self._present = _nothing(0)
        self._last = _nothing(0)

    def observe(self, reports: Reports) -> None:
        """Take in what all workers reported of one iteration; a report of no samples or no time tells nothing."""
        measured = np.stack((reports.samples, reports.compute_microseconds), axis=1)
        self._count(len(measured))
        self._present += np.where((measured > 0).all(axis=1, keepdims=True), measured, 0)

    def allocate(self, problem: Problem) -> Allocation:
        """The sizes of the problem's epoch; ConfigError where the problem's limits admit none."""
        self._count(problem.workers)
        if problem.epoch != self._epoch:
            self._last = np.where(self._present > 0, self._present, self._last)
            self._present = _nothing(problem.workers)
            self._epoch = problem.epoch
        sizes = shares(
            problem.global_batch_size,
            _performance(self._last),
            lower=problem.minimum,
            upper=problem.maximum,
            multiple=problem.multiple,
        )
        return Allocation(sizes=sizes, basis="speed" if self._last.all() else "start")

    def state_dict(self) -> State:
        return {"epoch": self._epoch, "present": self._present.tolist(), "last": self._last.tolist()}

    def load_state_dict(self, state: State) -> None:
        """Go on where the given state was taken; with another number of workers, as if nothing were known."""
        self._epoch = cast("int | None", state["epoch"])
        self._present = _totals(cast("list[list[int]]", state["present"]))
        self._last = _totals(cast("list[list[int]]", state["last"]))

    def _count(self, workers: int) -> None:
        """Begin anew where there are more or fewer workers than before."""
        if len(self._last) != workers:
            self._present, self._last = _nothing(workers), _nothing(workers)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PerEpoch:
    """DBS: sizes in step with the last epoch's speed, the same for a whole epoch."""

    minimum: int | None = None
    maximum: int | None = None
    multiple: int = 1

    def __post_init__(self) -> None:
        if self.multiple < 1:
            raise ConfigError(f"sizes cannot be multiples of {self.multiple}: use a multiple of at least 1")

    def policy(self, workers: int) -> LoadPolicy:
        """A new policy for this many workers."""
        return PerEpochPolicy()

    def estimator(self) -> Estimator:
        """A new estimator, whose speeds are only shown."""
        return Estimator(PREDICTORS["change"])


def _nothing(workers: int) -> IntArray:
    """Totals of an epoch, [workers, 2]: samples and the microseconds of pure compute that they took."""
    return np.zeros((workers, 2), dtype=np.int64)


def _totals(rows: list[list[int]]) -> IntArray:
    return np.array(rows, dtype=np.int64).reshape(len(rows), 2)


def _performance(totals: IntArray) -> IntArray:
    """Samples per microsecond against the fastest worker's, in a fixed unit; equal where a worker's is not known."""
    if not totals.all():
        return np.ones(len(totals), dtype=np.int64)
    # Products of totals need more than 64 bits.
    rows: list[tuple[int, int]] = [(samples, microseconds) for samples, microseconds in totals.tolist()]
    samples, microseconds = max(rows, key=lambda row: Fraction(*row))
    unit = microseconds << _WEIGHT_BITS
    weights = [max(own * unit // (time * samples), 1) for own, time in rows]
    return np.array(weights, dtype=np.int64)
