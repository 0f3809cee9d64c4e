"""The interface of a predictor of speed."""

from typing import Protocol

from evenstep.core.values import Factors, Prediction, Sample, State


class Predictor(Protocol):
    """Predicts one worker's seconds per sample. One instance per worker."""

    @property
    def uses_factors(self) -> bool:
        """Whether its predictions depend on the factors, which are sampled only then."""

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
