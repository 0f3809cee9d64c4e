"""The batch sizes that the user gave, by rank."""

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
        if not self.sizes:
            raise ConfigError("there are no batch sizes: give a number of samples for each worker, such as 12/9/3")
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

    def require(self, workers: int, global_batch_size: int | None = None) -> None:
        """Raise ConfigError unless there is one size for each worker and all add up to the global batch, if given."""
        if workers != len(self.sizes):
            raise ConfigError(
                f"there are sizes for {len(self.sizes)} workers, and the run has {workers}: give one for each"
            )
        if global_batch_size not in (None, total := sum(self.sizes)):
            raise ConfigError(
                f"the batch sizes {list(self.sizes)} add up to {total}, not to the global batch size"
                f" {global_batch_size}: correct one of them"
            )


@final
@dataclass(frozen=True, slots=True)
class StaticPolicy(LoadPolicy):
    """The user's sizes; a smaller batch (the last of an epoch) is divided in proportion to them."""

    given: Static

    def allocate(self, problem: Problem) -> Allocation:
        """The user's sizes; ConfigError if they break a limit or sum to less than the global batch."""
        sizes, batch = np.array(self.given.sizes, dtype=np.int64), problem.global_batch_size
        short = batch < int(sizes.sum())
        self.given.require(problem.workers, None if short else batch)
        if short:
            return Allocation(sizes=shares_of(problem, sizes))
        outside = (sizes < problem.minimum) | (sizes > problem.maximum)
        if outside.any():
            worker = int(np.argmax(outside))
            raise ConfigError(
                f"worker {worker} cannot take the batch size {int(sizes[worker])}: choose one from "
                f"{int(problem.minimum[worker])} to {int(problem.maximum[worker])}"
            )
        return Allocation(sizes=sizes)
