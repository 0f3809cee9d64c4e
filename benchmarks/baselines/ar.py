"""Predicts the next iteration by a linear model of the last few, fitted to a recent window."""

import math
from dataclasses import dataclass
from typing import Final, Self, cast, final

import numpy as np
import numpy.typing as npt
from evenstep.core.load.predict.base import Noise, seconds_per_sample
from evenstep.core.load.predict.narx import Recent

from evenstep.core.errors import ConfigError
from evenstep.core.values import Factors, Prediction, Sample, State

_LARGEST_ORDER: Final = 5
_MIN_DATA: Final = 20
_LAGS: Final = np.arange(1, _LARGEST_ORDER + 1)
_RIDGE: Final = 0.5
_MIN_RIDGE: Final = 1e-9
_MIN_SCATTER: Final = 0.01


@final
class Autoregressive:
    """An autoregressive model of log speed on the last `window` measurements: y_k = c + sum_j a_j * y_{k-j}.

    Fitted anew after every measurement by least squares with a small ridge on the a_j. The order, 0 to 5, is the one of
    the least AICc (Hurvich and Tsai 1989), all orders on the same data. With fewer than 20 measurements it is their
    mean. The prediction stays within the range of the window. LB-BSP compares with models of this kind; the paper does
    not say how they are fitted, all choices are ours.

    The relative error is the standard error of the fitted value: the scatter of the residuals (at least one per cent)
    times the root of the leverage.
    """

    __slots__ = ("_noise", "_recent")

    def __init__(self, window: int = 60) -> None:
        if window < _MIN_DATA:
            raise ConfigError(f"a model cannot be fitted to {window} iterations: use a window of at least {_MIN_DATA}")
        self._recent = Recent(window)
        self._noise = Noise()

    def observe(self, sample: Sample) -> None:
        self._noise.observe(sample, seconds_per_sample(sample))
        self._recent.observe(sample)

    def predict(self, factors: Factors) -> Prediction | None:
        """The model's next value; the factors are not used."""
        logs = np.array(self._recent.logs)
        if not len(logs):
            return None
        if len(logs) < _MIN_DATA:
            error = self._noise.level / math.sqrt(len(logs))
            return Prediction(seconds_per_sample=math.exp(float(logs.mean())), relative_error=error)
        fit = _Fit.to(logs)
        return Prediction(seconds_per_sample=math.exp(self._recent.clamp(fit.next)), relative_error=fit.error)

    def restart(self) -> None:
        """Forget the window; the noise level stays."""
        self._recent.clear()

    def state_dict(self) -> State:
        return {"recent": self._recent.state_dict(), "noise": self._noise.state_dict()}

    def load_state_dict(self, state: State) -> None:
        self._recent.load_state_dict(cast("State", state["recent"]))
        self._noise.load_state_dict(cast("State", state["noise"]))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Fit:
    """The next value by the model of the best order, and its standard error."""

    next: float
    error: float

    @classmethod
    def to(cls, logs: npt.NDArray[np.float64]) -> Self:
        """All orders from one Cholesky factor of the largest: the factors of the others are its leading blocks."""
        mean = float(logs.mean())
        centred = logs - mean
        # Row k: 1 and the values before k, newest first; the last row is what the next value is predicted from.
        before = np.lib.stride_tricks.sliding_window_view(centred, _LARGEST_ORDER)[:, ::-1]
        rows = np.column_stack([np.ones(len(before)), before])
        past, now, targets = rows[:-1], rows[-1], centred[_LARGEST_ORDER:]
        gram = past.T @ past
        gram[_LAGS, _LAGS] += _RIDGE * float(centred @ centred) / len(centred) + _MIN_RIDGE
        factor = np.linalg.cholesky(gram)
        moments, present = np.linalg.solve(factor, np.column_stack([past.T @ targets, now])).T
        # Running sums: entry p is that of order p.
        squares = float(targets @ targets) - np.cumsum(moments * moments)
        count, terms = len(targets), np.arange(1, _LARGEST_ORDER + 2)
        scatter = np.maximum(squares / (count - terms), _MIN_SCATTER**2)
        # One parameter more than terms: the scatter.
        penalties = 2.0 * (terms + 1) * count / (count - terms - 2)
        order = int(np.argmin(count * np.log(scatter * (count - terms) / count) + penalties))
        return cls(
            next=mean + float(np.cumsum(moments * present)[order]),
            error=float(np.sqrt(scatter * np.cumsum(present * present))[order]),
        )
