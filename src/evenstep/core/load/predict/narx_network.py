"""A network with one hidden layer that learns from one pair of inputs and target at a time."""

import math
from dataclasses import dataclass, field
from functools import cache
from typing import Final, TypeAlias, final

import numpy as np
import numpy.typing as npt

from evenstep.core.state import Stateful

_Floats: TypeAlias = npt.NDArray[np.float64]

_SEED: Final = 20180602
_HIDDEN: Final = 8
_FAMILIAR: Final = 15
_MEMORY: Final = 500
_MIN_SCALE: Final = 0.02
_MIN_TARGET: Final = 1e-3
_FURTHEST: Final = 4.0
_FORGET_EVERY: Final = 10
_RETENTION: Final = 0.995
_FIRST_OUTPUT: Final = 0.3
_HIDDEN_VARIANCE: Final = 0.3
_OUTPUT_VARIANCE: Final = 0.1
_NOISE_MEMORY: Final = 50
_MIN_NOISE: Final = 1e-3


@final
@dataclass(slots=True)
class NarxNetwork(Stateful):
    """y = u . tanh(W x + b) + w . x + c: eight tanh units and a linear path beside them, on z-scored inputs and target.

    The paper does not give layer sizes, optimiser or schedule; we take one step of the node-decoupled extended Kalman
    filter (Puskorius and Feldkamp 1994) per observation, without a replay buffer. It is Gauss-Newton online: the linear
    path is recursive least squares, each hidden unit has its own covariance, and there is no step size to choose. Every
    ten observations, weights and covariances return by 0.5 % to their first values: the network forgets, and the
    covariance of an input that never changes stays bounded.

    Means and scales of the z-scores are averages over about the last 500 observations; the first 15 are used for them
    alone. Inputs are clipped to four scales, and errors to four of the expected ones.

    Attributes:
        learned: How many pairs of inputs and target it was given.
    """

    width: int
    learned: int = field(init=False, default=0)
    _hidden: _Floats = field(init=False)
    _output: _Floats = field(init=False)
    _hidden_covariance: _Floats = field(init=False)
    _output_covariance: _Floats = field(init=False)
    _noise: float = field(init=False, default=1.0)
    _means: _Floats = field(init=False)
    _variances: _Floats = field(init=False)
    _inverse_scales: _Floats = field(init=False)
    _target_square: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self._hidden, self._output = (weights.copy() for weights in _first_weights(self.width))
        self._hidden_covariance = np.tile(np.eye(self.width + 1) * _HIDDEN_VARIANCE, (_HIDDEN, 1, 1))
        self._output_covariance = np.eye(_HIDDEN + self.width + 1) * _OUTPUT_VARIANCE
        self._means, self._variances = np.zeros(self.width), np.zeros(self.width)
        self._inverse_scales = _inverse(self._variances)

    def predict(self, inputs: list[float]) -> float:
        """The target for these inputs."""
        return float(self._output @ self._features(self._scores(inputs))) * self._target_scale

    def learn(self, inputs: list[float], target: float) -> float:
        """One step towards the target; returns what `predict` would have said before it."""
        scores, scale = self._scores(inputs), self._target_scale
        features = self._features(scores)
        predicted = float(self._output @ features)
        if self.learned >= _FAMILIAR:
            self._step(scores, features, target / scale - predicted)
            if self.learned % _FORGET_EVERY == 0:
                self._forget()
        self.learned += 1
        weight = max(1.0 / self.learned, 1.0 / _MEMORY)
        offsets = np.array(inputs) - self._means
        self._means += weight * offsets
        self._variances += weight * ((1.0 - weight) * offsets * offsets - self._variances)
        self._inverse_scales = _inverse(self._variances)
        self._target_square += weight * (target * target - self._target_square)
        return predicted * scale

    @property
    def _target_scale(self) -> float:
        return max(math.sqrt(self._target_square), _MIN_TARGET)

    def _scores(self, inputs: list[float]) -> _Floats:
        """The inputs as z-scores, and a one for the biases."""
        scores = np.ones(len(inputs) + 1)
        scores[:-1] = (np.array(inputs) - self._means) * self._inverse_scales
        return np.maximum(np.minimum(scores, _FURTHEST), -_FURTHEST)

    def _features(self, scores: _Floats) -> _Floats:
        """What the output is linear in: the hidden units' activations, the scores and a one."""
        return np.concatenate([np.tanh(self._hidden @ scores), scores])

    def _step(self, scores: _Floats, features: _Floats, error: float) -> None:
        activations = features[:_HIDDEN]
        slopes = self._output[:_HIDDEN] * (1.0 - activations * activations)
        # The gradient of hidden unit j is its slope times the scores: one product serves all units.
        hidden = (self._hidden_covariance.reshape(-1, len(scores)) @ scores).reshape(_HIDDEN, -1)
        hidden *= slopes[:, np.newaxis]
        output = self._output_covariance @ features
        expected = self._noise + float(slopes @ (hidden @ scores)) + float(output @ features)
        limit = _FURTHEST * math.sqrt(expected)
        error = min(max(error, -limit), limit)
        self._hidden += error / expected * hidden
        self._output += error / expected * output
        # Halved evenly between both sides of the product, which keeps the covariances symmetric to the last bit.
        hidden /= math.sqrt(expected)
        output /= math.sqrt(expected)
        self._hidden_covariance -= hidden[:, :, np.newaxis] * hidden[:, np.newaxis, :]
        self._output_covariance -= output[:, np.newaxis] * output
        self._noise = max(self._noise + (error * error - self._noise) / _NOISE_MEMORY, _MIN_NOISE)

    def _forget(self) -> None:
        """Return weights and covariances a little to the first ones."""
        first_hidden, first_output = _first_weights(self.width)
        self._hidden += (1.0 - _RETENTION) * (first_hidden - self._hidden)
        self._output += (1.0 - _RETENTION) * (first_output - self._output)
        for covariance in self._hidden_covariance:
            _return(covariance, _HIDDEN_VARIANCE)
        _return(self._output_covariance, _OUTPUT_VARIANCE)


@cache
def _first_weights(width: int) -> tuple[_Floats, _Floats]:
    """Of the hidden units and of the output, drawn from a fixed seed."""
    random = np.random.Generator(np.random.Philox(_SEED))
    hidden = random.normal(0.0, width**-0.5, (_HIDDEN, width + 1))
    return hidden, np.concatenate([random.normal(0.0, _FIRST_OUTPUT, _HIDDEN), np.zeros(width + 1)])


def _return(covariance: _Floats, first_variance: float) -> None:
    covariance *= _RETENTION**2
    covariance.reshape(-1)[:: len(covariance) + 1] += (1.0 - _RETENTION**2) * first_variance


def _inverse(variances: _Floats) -> _Floats:
    """One over the scale of each input, which is bounded for an input that does not change."""
    return 1.0 / np.sqrt(variances + _MIN_SCALE**2)
