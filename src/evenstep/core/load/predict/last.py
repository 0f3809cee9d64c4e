"""Predicts that the next iteration takes what the last one took."""

from typing import Final, cast, final

from evenstep.core.load.predict.noise import Noise, seconds_per_sample
from evenstep.core.values import Factors, Prediction, Sample, State


@final
class Last:
    """The last measurement: the memoryless baseline that LB-BSP is compared with.

    Its relative error is the scatter of the measurements, learned beside it; the paper states none.
    """

    __slots__ = ("_last", "_noise")

    uses_factors: Final = False

    def __init__(self) -> None:
        self._last: float | None = None
        self._noise = Noise()

    def observe(self, sample: Sample) -> None:
        self._noise.observe(sample)
        self._last = seconds_per_sample(sample)

    def predict(self, factors: Factors) -> Prediction | None:
        """The last measured seconds per sample; the factors are not used."""
        if self._last is None:
            return None
        return Prediction(seconds_per_sample=self._last, relative_error=self._noise.level)

    def restart(self) -> None:
        self._last = None

    def state_dict(self) -> State:
        return {"last": self._last, "noise": self._noise.state_dict()}

    def load_state_dict(self, state: State) -> None:
        self._last = cast("float | None", state["last"])
        self._noise.load_state_dict(cast("State", state["noise"]))
