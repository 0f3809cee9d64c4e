"""The interface of the question *how much*: a scheme's part, and the policy that it makes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self, final

from evenstep.core.errors import ConfigError
from evenstep.core.state import Stateful
from evenstep.core.values import Allocation, Problem, Reports


class LoadPolicy(Stateful, ABC):
    """Decides the batch size of every worker.

    Every worker runs its own copy on the same reports, and all copies must decide alike: from integers, without a clock
    or random numbers. A policy with memory is a dataclass whose fields with `init=False` are its checkpoint (see
    `Stateful`), or defines `state_dict` and `load_state_dict`.
    """

    __slots__ = ()

    def observe(self, reports: Reports) -> None:
        """Take in all workers' reports about one iteration, oldest first."""

    @abstractmethod
    def allocate(self, problem: Problem) -> Allocation:
        """Return the next iteration's sizes. Repeated calls without an `observe` in between return the same sizes.

        Raises:
            ConfigError: No sizes satisfy the problem's limits.
        """

    def recall(self, known: Sequence["tuple[LoadPolicy, int] | None"]) -> None:
        """Take over the knowledge of earlier policies of this kind about these workers, after workers came or went.

        `known` has, for each worker of this policy, its earlier policy and its index there; None for a new worker.
        """


@dataclass(frozen=True, kw_only=True)
class Load(ABC):
    """The part of a scheme that answers *how much*: it makes the policy.

    Attributes:
        minimum: The smallest batch of a worker, in samples; None for 2, or 1 if 2 is not possible.
        maximum: The largest batch of a worker, in samples, besides what its memory allows; None for no limit.
        multiple: Sizes are multiples of this, except in the last slice of an epoch.
        follows_speed: Whether sizes depend on the workers' reports. If not, `observe` may not be called.
        by_epoch: Whether sizes change only between epochs.

    Raises:
        ConfigError: A value is out of range.
    """

    follows_speed: ClassVar[bool] = True
    by_epoch: ClassVar[bool] = False

    minimum: int | None = None
    maximum: int | None = None
    multiple: int = 1

    def __post_init__(self) -> None:
        if self.multiple < 1:
            raise ConfigError(f"sizes cannot be multiples of {self.multiple}: use a multiple of at least 1")
        if (self.minimum or 0) < 0 or (self.maximum is not None and self.maximum < max(self.minimum or 0, 1)):
            raise ConfigError(
                f"minimum={self.minimum} and maximum={self.maximum} leave no size: use 0 <= minimum <= maximum"
            )

    @abstractmethod
    def policy(self, workers: int) -> LoadPolicy:
        """A new policy for this many workers."""

    @property
    def uses_forecasts(self) -> bool:
        """True if sizes depend on each worker's forecast of itself (`Reports.forecast`)."""
        return False

    @property
    def given_sizes(self) -> tuple[int, ...] | None:
        """The sizes by rank if the user gave them, in which case no report changes them; else None."""
        return None

    def for_workers(self, ranks: Sequence[int]) -> Self:
        """The same load for only these workers of the run."""
        return self


@final
@dataclass(frozen=True, kw_only=True)
class LoadOf(Load):
    """Sizes that follow speeds, decided by the policies that `make` returns for a number of workers."""

    make: Callable[[int], LoadPolicy]

    def policy(self, workers: int) -> LoadPolicy:
        return self.make(workers)
