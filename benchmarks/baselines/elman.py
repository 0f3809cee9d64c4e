"""A small recurrent network that learns a series of numbers as it comes."""

from collections import deque
from typing import Final, TypeAlias, cast, final

import numpy as np
import numpy.typing as npt

from evenstep.core.values import State

_Floats: TypeAlias = npt.NDArray[np.float64]

_SEED: Final = 20180603
_UNITS: Final = 8
_INTO: Final = _UNITS * _UNITS
_BIAS: Final = _INTO + _UNITS
_OUTPUT: Final = _BIAS + _UNITS
_STEPS: Final = 10
_RATE: Final = 0.01
_DECAYS: Final = (0.9, 0.99)
_MIN_ROOT: Final = 1e-6
_FURTHEST: Final = 4.0


@final
class Elman:
    """An Elman network (Elman 1990): h_t = tanh(W h_{t-1} + a x_t + b), x_{t+1} predicted as u . h_t + c; eight units.

    Per number it takes one step of Adam (Kingma and Ba 2015) on the mean squared error over the last ten steps, by
    backpropagation through them; the state before them is taken as given. The first weights are drawn from a fixed
    seed; b, u and c begin at 0. Numbers beyond four count as four.
    """

    __slots__ = ("_adam_mean", "_adam_square", "_inputs", "_start", "_state", "_steps", "_weights")

    def __init__(self) -> None:
        random = np.random.Generator(np.random.Philox(_SEED))
        self._weights: _Floats = np.zeros(_UNITS * (_UNITS + 3) + 1)
        self._weights[:_BIAS] = random.normal(0.0, _UNITS**-0.5, _BIAS)
        self._adam_mean: _Floats = np.zeros(len(self._weights))
        self._adam_square: _Floats = np.zeros(len(self._weights))
        self._steps = 0
        self._inputs: deque[float] = deque(maxlen=_STEPS)
        self._start: _Floats = np.zeros(_UNITS)
        self._state: _Floats = np.zeros(_UNITS)

    @property
    def prediction(self) -> float:
        """The next number."""
        return float(self._weights[_OUTPUT:-1] @ self._state + self._weights[-1])

    def observe(self, number: float) -> None:
        """Learn from the number, then take it in."""
        number = min(max(number, -_FURTHEST), _FURTHEST)
        if self._inputs:
            self._descend(self._gradient([*self._inputs, number]))
        self._inputs.append(number)
        self._state = np.tanh(self._recurrent @ self._state + self._driven(np.array([number]))[0])

    def rewind(self) -> None:
        """Forget the series but not what was learned from it."""
        self._inputs.clear()
        self._start = np.zeros(_UNITS)
        self._state = np.zeros(_UNITS)

    def state_dict(self) -> State:
        return {
            "weights": self._weights.tolist(),
            "adam_mean": self._adam_mean.tolist(),
            "adam_square": self._adam_square.tolist(),
            "steps": self._steps,
            "inputs": list(self._inputs),
            "start": self._start.tolist(),
            "state": self._state.tolist(),
        }

    def load_state_dict(self, state: State) -> None:
        lists = cast("dict[str, list[float]]", state)
        self._weights = np.array(lists["weights"])
        self._adam_mean, self._adam_square = np.array(lists["adam_mean"]), np.array(lists["adam_square"])
        self._steps = cast("int", state["steps"])
        self._inputs = deque(lists["inputs"], maxlen=_STEPS)
        self._start, self._state = np.array(lists["start"]), np.array(lists["state"])

    @property
    def _recurrent(self) -> _Floats:
        return self._weights[:_INTO].reshape(_UNITS, _UNITS)

    def _driven(self, numbers: _Floats) -> _Floats:
        """What each number adds to the units' sums; shape [numbers, units]."""
        return np.outer(numbers, self._weights[_INTO:_BIAS]) + self._weights[_BIAS:_OUTPUT]

    def _gradient(self, series: list[float]) -> _Floats:
        """Of the mean squared error over the series, each number predicted from those before it; moves the states."""
        inputs, targets, steps = np.array(series[:-1]), np.array(series[1:]), len(series) - 1
        recurrent, output = self._recurrent, self._weights[_OUTPUT:-1]
        driven = self._driven(inputs)
        states = np.empty((steps + 1, _UNITS))
        states[0] = self._start
        for step in range(steps):
            states[step + 1] = np.tanh(recurrent @ states[step] + driven[step])
        errors = (states[1:] @ output + self._weights[-1] - targets) / steps
        slopes = 1.0 - states[1:] * states[1:]
        deltas = np.outer(errors, output)
        later = np.zeros(_UNITS)
        for step in reversed(range(steps)):
            deltas[step] = slopes[step] * (deltas[step] + later)
            later = deltas[step] @ recurrent
        if steps == _STEPS:
            self._start = states[1]
        self._state = states[-1]
        return np.concatenate(
            [(deltas.T @ states[:-1]).ravel(), inputs @ deltas, deltas.sum(axis=0), errors @ states[1:], [errors.sum()]]
        )

    def _descend(self, gradient: _Floats) -> None:
        self._steps += 1
        first, second = _DECAYS
        self._adam_mean += (1.0 - first) * (gradient - self._adam_mean)
        self._adam_square += (1.0 - second) * (gradient * gradient - self._adam_square)
        scale = np.sqrt(self._adam_square / (1.0 - second**self._steps)) + _MIN_ROOT
        self._weights -= _RATE / (1.0 - first**self._steps) * self._adam_mean / scale
