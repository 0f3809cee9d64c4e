"""The interface of the question *how much*: the part of a scheme, and the policy that it makes."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from evenstep.core.errors import ConfigError
from evenstep.core.load.estimate import Estimator
from evenstep.core.load.predict import PREDICTORS
from evenstep.core.state import Stateful
from evenstep.core.values import Allocation, Problem, Reports


class LoadPolicy(Stateful, ABC):
    """Decides the batch size of every worker.

    Every worker runs its own copy on the same reports, and all copies must decide the same: from integers, and without
    a clock or random numbers. A policy with memory is a dataclass whose fields with `init=False` are its checkpoint
    (see `Stateful`), or defines `state_dict` and `load_state_dict`.
    """

    __slots__ = ()

    def observe(self, reports: Reports) -> None:
        """Take in what all workers reported about one iteration, oldest first."""

    @abstractmethod
    def allocate(self, problem: Problem) -> Allocation:
        """The sizes of the next iteration; called again without an `observe` between, the same sizes.

        Raises:
            ConfigError: The problem's limits admit no sizes.
        """


@dataclass(frozen=True, kw_only=True)
class Load(ABC):
    """The answer to *how much* as a part of a scheme: makes the policy, and each worker's estimator.

    Attributes:
        minimum: The smallest batch of a worker, in samples; None for 2, or 1 if 2 is not possible.
        maximum: The largest batch of a worker, in samples, besides what its memory allows; None for no limit.
        multiple: Sizes are multiples of this, except in the last slice of an epoch.
        follows_speed: Whether sizes depend on the workers' reports. If not, `observe` may not be called.
        uses_estimates: Whether sizes depend on the estimates in the reports (`nanoseconds_per_sample`,
            `fixed_nanoseconds`, `error_ppm`, `flat_size`) and not on measured times alone. If not, they may be 0.
        by_epoch: Whether sizes change between epochs alone.

    Raises:
        ConfigError: A value is out of range.
    """

    follows_speed: ClassVar[bool] = True
    uses_estimates: ClassVar[bool] = True
    by_epoch: ClassVar[bool] = False

    minimum: int | None = None
    maximum: int | None = None
    multiple: int = 1

    def __post_init__(self) -> None:
        if self.multiple < 1:
            raise ConfigError(f"sizes cannot be multiples of {self.multiple}: use a multiple of at least 1")
        if self.minimum is not None and self.minimum < 0:
            raise ConfigError(f"the smallest batch cannot be {self.minimum} samples: use a minimum of at least 0")

    @abstractmethod
    def policy(self, workers: int) -> LoadPolicy:
        """A new policy for this many workers."""

    def estimator(self) -> Estimator:
        """A new estimator of one worker's speed."""
        return Estimator(PREDICTORS["change"])

    @property
    def given_sizes(self) -> tuple[int, ...] | None:
        """The sizes by rank if the user gave them: nothing that a worker reports changes them. Else None."""
        return None

    def for_workers(self, ranks: Sequence[int]) -> Self:
        """The same for these workers of the run alone."""
        return self
