"""The same batch size for everyone: plain synchronous training."""

from dataclasses import dataclass
from typing import final

import numpy as np

from evenstep.core.load.allocate.shares import shares
from evenstep.core.load.base import LoadPolicy
from evenstep.core.load.estimate import Estimator
from evenstep.core.load.predict import PREDICTORS
from evenstep.core.values import Allocation, IntArray, Problem, Reports, State


@final
class EqualPolicy:
    """Equal sizes within the limits; what does not divide goes to the lowest ranks, one multiple each."""

    __slots__ = ()

    def observe(self, reports: Reports) -> None:
        """Not used: the sizes do not depend on speed."""

    def allocate(self, problem: Problem) -> Allocation:
        """Equal sizes; ConfigError where the problem's limits admit none."""
        return Allocation(sizes=equal_sizes(problem))

    def state_dict(self) -> State:
        """Nothing to remember."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Nothing to remember."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Equal:
    """Equal sizes, as under plain DDP."""

    minimum: int | None = None
    maximum: int | None = None
    multiple: int = 1

    def policy(self, workers: int) -> LoadPolicy:
        """A new policy for this many workers."""
        return EqualPolicy()

    def estimator(self) -> Estimator:
        """A new estimator, whose speeds are only shown."""
        return Estimator(PREDICTORS["change"])


def equal_sizes(problem: Problem) -> IntArray:
    """The sizes closest to equal that satisfy the problem, int64 of shape [workers]."""
    return shares(
        problem.global_batch_size,
        np.ones_like(problem.minimum),
        lower=problem.minimum,
        upper=problem.maximum,
        multiple=problem.multiple,
    )
