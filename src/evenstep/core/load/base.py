"""The interfaces of the question *how much*; nothing else."""

from typing import Protocol

from evenstep.core.load.estimate import Estimator
from evenstep.core.values import Allocation, Problem, Reports, State


class LoadPolicy(Protocol):
    """Decides every worker's batch size, alike on every worker that sees the same reports."""

    def observe(self, reports: Reports) -> None:
        """Take in what all workers reported of one iteration, oldest first."""

    def allocate(self, problem: Problem) -> Allocation:
        """The sizes of the next iteration."""

    def state_dict(self) -> State:
        """Everything that `load_state_dict` needs to go on bit for bit."""

    def load_state_dict(self, state: State) -> None:
        """Go on where the given state was taken."""


class Load(Protocol):
    """The answer to *how much* as a part of a scheme: makes the policy and each worker's estimator."""

    @property
    def minimum(self) -> int | None:
        """The least size of a worker, in samples; None leaves it to the runtime."""

    @property
    def maximum(self) -> int | None:
        """The largest size of a worker, in samples, beside what its memory allows; None for no other limit."""

    @property
    def multiple(self) -> int:
        """Sizes are multiples of this, except in the last slice of an epoch."""

    def policy(self, workers: int) -> LoadPolicy:
        """A new policy for this many workers."""

    def estimator(self) -> Estimator:
        """A new estimator of one worker's speed."""
