"""The batch sizes that the user gave."""

from dataclasses import dataclass
from typing import final

import numpy as np

from evenstep.core.errors import ConfigError
from evenstep.core.load.allocate.shares import shares
from evenstep.core.load.base import LoadPolicy
from evenstep.core.load.estimate import Estimator
from evenstep.core.load.predict import PREDICTORS
from evenstep.core.values import Allocation, IntArray, Problem, Reports, State


@final
class StaticPolicy:
    """The user's sizes, int64 of shape [workers]; a smaller batch (the last of an epoch) is shared in proportion."""

    __slots__ = ("_sizes",)

    def __init__(self, sizes: IntArray) -> None:
        self._sizes = sizes

    def observe(self, reports: Reports) -> None:
        """Not used: the sizes do not depend on speed."""

    def allocate(self, problem: Problem) -> Allocation:
        """The user's sizes; ConfigError where they break a limit or sum to less than the global batch."""
        batch, total = problem.global_batch_size, int(self._sizes.sum())
        if problem.workers != len(self._sizes):
            raise ConfigError(
                f"{len(self._sizes)} batch sizes were given for {problem.workers} workers: give one for each"
            )
        if batch > total:
            raise ConfigError(
                f"the batch sizes {self._sizes.tolist()} sum to {total}, not to the global batch of {batch}: "
                "change the sizes or the global batch size"
            )
        if batch < total:
            sizes = shares(batch, self._sizes, lower=problem.minimum, upper=problem.maximum, multiple=problem.multiple)
            return Allocation(sizes=sizes)
        outside = (self._sizes < problem.minimum) | (self._sizes > problem.maximum)
        if outside.any():
            worker = int(np.argmax(outside))
            raise ConfigError(
                f"worker {worker} cannot take the batch size {int(self._sizes[worker])}: choose one from "
                f"{int(problem.minimum[worker])} to {int(problem.maximum[worker])}"
            )
        return Allocation(sizes=self._sizes.copy())

    def state_dict(self) -> State:
        """Nothing to remember: the sizes are the configuration's."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Nothing to remember."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Static:
    """The user's sizes, one per worker, in samples: correct weighting, no tuning."""

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if any(size < 0 for size in self.sizes) or not any(self.sizes):
            raise ConfigError(
                f"the batch sizes {list(self.sizes)} are not all sizes: give numbers of samples from 0 up"
            )

    @property
    def minimum(self) -> int | None:
        """The runtime's own: the sizes are given."""
        return None

    @property
    def maximum(self) -> int | None:
        """No limit beside memory: the sizes are given."""
        return None

    @property
    def multiple(self) -> int:
        """1: the sizes are given."""
        return 1

    def policy(self, workers: int) -> LoadPolicy:
        """A new policy; ConfigError where the number of sizes is not the number of workers."""
        if workers != len(self.sizes):
            raise ConfigError(f"{len(self.sizes)} batch sizes were given for {workers} workers: give one for each")
        return StaticPolicy(np.array(self.sizes, dtype=np.int64))

    def estimator(self) -> Estimator:
        """A new estimator, whose speeds are only shown."""
        return Estimator(PREDICTORS["change"])
