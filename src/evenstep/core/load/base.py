"""The interfaces of the question *how much*; nothing else."""

from typing import TYPE_CHECKING, Protocol

from evenstep.core.values import Allocation, Factors, IntArray, Prediction, Problem, Reports, Sample, State

if TYPE_CHECKING:
    from evenstep.core.load.estimate import Estimator


class Predictor(Protocol):
    """Predicts one worker's seconds per sample. One instance per worker."""

    def observe(self, sample: Sample) -> None:
        """Take in one measured iteration, oldest first."""

    def predict(self, factors: Factors) -> Prediction | None:
        """The next iteration, given the factors known before it; None as long as nothing was observed."""

    def restart(self) -> None:
        """Forget the level of the speed, since samples count differently from now on; what else was learned stays."""

    def state_dict(self) -> State:
        """Everything that `load_state_dict` needs to go on bit for bit."""

    def load_state_dict(self, state: State) -> None:
        """Go on where the given state was taken."""


class TimeModels(Protocol):
    """Time as a function of batch size, for all workers at once; monotone in the size. Integers, shape [workers]."""

    def nanoseconds(self, sizes: IntArray) -> IntArray:
        """How long each worker takes for its size."""

    def largest(self, nanoseconds: int) -> IntArray:
        """The largest size that each worker finishes within the given time; may be negative where it finishes none."""


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

    def estimator(self) -> "Estimator":
        """A new estimator of one worker's speed."""
