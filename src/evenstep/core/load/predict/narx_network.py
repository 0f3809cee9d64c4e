"""A network with one hidden layer that learns from one pair of inputs and target at a time."""

import math
from typing import Final, TypeAlias, cast, final

import numpy as np
import numpy.typing as npt

from evenstep.core.values import State

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
class NarxNetwork:
    """y = u . tanh(W x + b) + w . x + c: eight tanh units and a linear path beside them, on z-scored inputs and target.

    The paper does not give layer sizes, optimiser or schedule; we take one step of the node-decoupled extended Kalman
    filter (Puskorius and Feldkamp 1994) per observation, without a replay buffer. It is Gauss-Newton on line: the
    linear path is recursive least squares, each hidden unit has a covariance of its own, and there is no step size to
    choose. Every ten observations weights and covariances return to where they began by half a per cent: the network
    forgets, and the covariance of an input that never changes stays bounded. The first weights are drawn from a fixed
    seed.

    Means and scales of the z-scores are averages over about the last 500 observations; the first 15 give nothing else.
    Inputs beyond four scales count as four, and so do errors beyond four of the expected ones.
    """

    __slots__ = (
        "_first_hidden",
        "_first_output",
        "_hidden",
        "_hidden_covariance",
        "_inverse_scales",
        "_learned",
        "_means",
        "_noise",
        "_output",
        "_output_covariance",
        "_target_square",
        "_variances",
    )

    def __init__(self, width: int) -> None:
        random = np.random.Generator(np.random.Philox(_SEED))
        self._first_hidden: _Floats = random.normal(0.0, width**-0.5, (_HIDDEN, width + 1))
        self._first_output: _Floats = np.zeros(_HIDDEN + width + 1)
        self._first_output[:_HIDDEN] = random.normal(0.0, _FIRST_OUTPUT, _HIDDEN)
        self._hidden = self._first_hidden.copy()
        self._output = self._first_output.copy()
        self._hidden_covariance: _Floats = np.tile(np.eye(width + 1) * _HIDDEN_VARIANCE, (_HIDDEN, 1, 1))
        self._output_covariance: _Floats = np.eye(_HIDDEN + width + 1) * _OUTPUT_VARIANCE
        self._means: _Floats = np.zeros(width)
        self._variances: _Floats = np.zeros(width)
        self._inverse_scales = _inverse(self._variances)
        self._target_square = 0.0
        self._noise = 1.0
        self._learned = 0

    @property
    def learned(self) -> int:
        """How many pairs it was given."""
        return self._learned

    def predict(self, inputs: list[float]) -> float:
        """The target for these inputs."""
        return float(self._output @ self._features(self._scores(inputs))) * self._target_scale

    def learn(self, inputs: list[float], target: float) -> float:
        """One step towards the target; returns what `predict` would have said before it."""
        scores, scale = self._scores(inputs), self._target_scale
        features = self._features(scores)
        predicted = float(self._output @ features)
        if self._learned >= _FAMILIAR:
            self._step(scores, features, target / scale - predicted)
            if self._learned % _FORGET_EVERY == 0:
                self._forget()
        self._learned += 1
        weight = max(1.0 / self._learned, 1.0 / _MEMORY)
        offsets = np.array(inputs) - self._means
        self._means += weight * offsets
        self._variances += weight * ((1.0 - weight) * offsets * offsets - self._variances)
        self._inverse_scales = _inverse(self._variances)
        self._target_square += weight * (target * target - self._target_square)
        return predicted * scale

    def state_dict(self) -> State:
        return {
            "learned": self._learned,
            "hidden": self._hidden.tolist(),
            "output": self._output.tolist(),
            "hidden_covariance": self._hidden_covariance.tolist(),
            "output_covariance": self._output_covariance.tolist(),
            "noise": self._noise,
            "means": self._means.tolist(),
            "variances": self._variances.tolist(),
            "target_square": self._target_square,
        }

    def load_state_dict(self, state: State) -> None:
        self._learned = cast("int", state["learned"])
        self._hidden, self._output = np.array(state["hidden"]), np.array(state["output"])
        self._hidden_covariance = np.array(state["hidden_covariance"])
        self._output_covariance = np.array(state["output_covariance"])
        self._noise = cast("float", state["noise"])
        self._means, self._variances = np.array(state["means"]), np.array(state["variances"])
        self._inverse_scales = _inverse(self._variances)
        self._target_square = cast("float", state["target_square"])

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
        self._hidden += (1.0 - _RETENTION) * (self._first_hidden - self._hidden)
        self._output += (1.0 - _RETENTION) * (self._first_output - self._output)
        for covariance in self._hidden_covariance:
            _return(covariance, _HIDDEN_VARIANCE)
        _return(self._output_covariance, _OUTPUT_VARIANCE)


def _return(covariance: _Floats, first_variance: float) -> None:
    covariance *= _RETENTION**2
    covariance.reshape(-1)[:: len(covariance) + 1] += (1.0 - _RETENTION**2) * first_variance


def _inverse(variances: _Floats) -> _Floats:
    """One over the scale of each input, which is bounded for an input that does not change."""
    return 1.0 / np.sqrt(variances + _MIN_SCALE**2)
