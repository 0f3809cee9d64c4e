"""The batch sizes that the user gave."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self, final

import numpy as np

from evenstep.core.errors import ConfigError
from evenstep.core.load.base import Load, LoadPolicy
from evenstep.core.load.shares import shares_of
from evenstep.core.values import Allocation, Problem


@final
@dataclass(frozen=True, kw_only=True)
class Static(Load):
    """The user's sizes, one per worker, in samples: correct weighting, no tuning."""

    follows_speed: ClassVar[bool] = False

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if any(size < 0 for size in self.sizes) or not any(self.sizes):
            raise ConfigError(
                f"the batch sizes {list(self.sizes)} are not all sizes: give numbers of samples from 0 up"
            )

    @property
    def given_sizes(self) -> tuple[int, ...]:
        return self.sizes

    def for_workers(self, ranks: Sequence[int]) -> Self:
        return replace(self, sizes=tuple(self.sizes[rank] for rank in ranks))

    def policy(self, workers: int) -> LoadPolicy:
        """A new policy; ConfigError if the number of sizes is not the number of workers."""
        self.require(workers)
        return StaticPolicy(self)

    def require(self, workers: int) -> None:
        """Raise ConfigError unless there is one size for each worker."""
        if workers != len(self.sizes):
            raise ConfigError(f"{len(self.sizes)} batch sizes were given for {workers} workers: give one for each")


@final
@dataclass(frozen=True, slots=True)
class StaticPolicy(LoadPolicy):
    """The user's sizes; a smaller batch (the last of an epoch) is shared out in proportion to them."""

    given: Static

    def allocate(self, problem: Problem) -> Allocation:
        """The user's sizes; ConfigError if they break a limit or sum to less than the global batch."""
        self.given.require(problem.workers)
        sizes = np.array(self.given.sizes, dtype=np.int64)
        batch, total = problem.global_batch_size, int(sizes.sum())
        if batch > total:
            raise ConfigError(
                f"the batch sizes {sizes.tolist()} sum to {total}, not to the global batch of {batch}: "
                "change the sizes or the global batch size"
            )
        if batch < total:
            return Allocation(sizes=shares_of(problem, sizes))
        outside = (sizes < problem.minimum) | (sizes > problem.maximum)
        if outside.any():
            worker = int(np.argmax(outside))
            raise ConfigError(
                f"worker {worker} cannot take the batch size {int(sizes[worker])}: choose one from "
                f"{int(problem.minimum[worker])} to {int(problem.maximum[worker])}"
            )
        return Allocation(sizes=sizes)
