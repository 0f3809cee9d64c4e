"""The same batch size for every worker: plain synchronous training."""

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, final

import numpy as np

from evenstep.core.load.base import Load, LoadPolicy
from evenstep.core.load.shares import shares_of
from evenstep.core.values import Allocation, IntArray, Problem


@final
@dataclass(frozen=True, kw_only=True)
class Equal(Load):
    """Equal sizes, as in plain DDP."""

    follows_speed: ClassVar[bool] = False

    def policy(self, workers: int) -> LoadPolicy:
        return EqualPolicy()


@final
class EqualPolicy(LoadPolicy):
    """Equal sizes within the limits; a remainder goes to the lowest ranks, one multiple each."""

    def allocate(self, problem: Problem) -> Allocation:
        """Equal sizes; ConfigError if no sizes satisfy the problem's limits."""
        return Allocation(sizes=equal_sizes(problem))


@lru_cache(maxsize=4)  # A problem lasts for many iterations.
def equal_sizes(problem: Problem) -> IntArray:
    """The sizes closest to equal that satisfy the problem, int64 of shape [workers], read-only."""
    sizes = shares_of(problem, np.ones_like(problem.minimum))
    sizes.flags.writeable = False
    return sizes
