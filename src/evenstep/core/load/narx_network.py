"""A network with one hidden layer that learns online, one pair of inputs and target at a time."""

import math
from dataclasses import dataclass, field
from functools import cache
from typing import Final, final

import numpy as np

from evenstep.core.state import Stateful
from evenstep.core.values import FloatArray

_SEED: Final = 20180602
_LEAST_NOISE: Final = 1e-3
"""The least scale of the target and variance of errors, which keep divisions finite."""


@final
@dataclass(slots=True, kw_only=True)
class NarxNetwork(Stateful):
    """y = u . tanh(W x + b) + w . x + c: tanh units and a parallel linear path, on z-scored inputs and target.

    The paper does not give layer sizes, optimiser or schedule; we take one step of the node-decoupled extended Kalman
    filter (Puskorius and Feldkamp 1994) per observation, without a replay buffer. It is online Gauss-Newton: the linear
    path is recursive least squares, each hidden unit has its own covariance, and there is no step size to choose. Every
    ten observations weights and covariances return by 1 - `retention` to their first values: the network forgets, and
    the covariance of an input that never changes stays bounded.

    Args:
        width: The number of inputs.
        hidden: The number of tanh units.
        familiar: The first observations, used only for the means and scales of the z-scores.
        memory: Observations over which these are averaged.
        furthest: In standard deviations: inputs are clipped to it, and errors to this many expected ones.
        retention: The part of what was learned that is left after ten observations.
        variances: Initial variances of the weights of hidden units, and of the output.

    Attributes:
        learned: The number of pairs of inputs and target that it was given.
    """

    width: int
    hidden: int = 8
    familiar: int = 15
    memory: int = 500
    furthest: float = 4.0
    retention: float = 0.995
    variances: tuple[float, float] = (0.3, 0.1)
    learned: int = field(init=False, default=0)
    _hidden: FloatArray = field(init=False)
    _output: FloatArray = field(init=False)
    _hidden_covariance: FloatArray = field(init=False)
    _output_covariance: FloatArray = field(init=False)
    _noise: float = field(init=False, default=1.0)
    _means: FloatArray = field(init=False)
    _squares: FloatArray = field(init=False)  # Variances of the inputs, and the mean square of the target.

    def __post_init__(self) -> None:
        self._hidden, self._output = (weights.copy() for weights in _first_weights(self.hidden, self.width))
        self._hidden_covariance = np.tile(np.eye(self.width + 1) * self.variances[0], (self.hidden, 1, 1))
        self._output_covariance = np.eye(self.hidden + self.width + 1) * self.variances[1]
        self._means, self._squares = np.zeros(self.width), np.zeros(self.width + 1)

    def predict(self, inputs: list[float]) -> float:
        """The target for these inputs."""
        return float(self._output @ self._features(self._scores(inputs))) * self._scale

    def learn(self, inputs: list[float], target: float) -> float:
        """Take one step towards the target; return the prediction before it."""
        scores, scale = self._scores(inputs), self._scale
        features = self._features(scores)
        predicted = float(self._output @ features)
        if self.learned >= self.familiar:
            self._step(scores, features, target / scale - predicted)
            if self.learned % 10 == 0:
                self._forget()
        self.learned += 1
        weight = max(1.0 / self.learned, 1.0 / self.memory)
        offsets = np.array(inputs) - self._means
        self._means += weight * offsets
        self._squares += weight * (np.append((1.0 - weight) * offsets * offsets, target * target) - self._squares)
        return predicted * scale

    @property
    def _scale(self) -> float:
        return max(math.sqrt(self._squares[-1]), _LEAST_NOISE)

    def _scores(self, inputs: list[float]) -> FloatArray:
        """The inputs as z-scores, without magnifying one that hardly changes, and a one for the biases."""
        scores = (np.array(inputs) - self._means) / np.sqrt(self._squares[:-1] + 0.02**2)
        return np.append(np.clip(scores, -self.furthest, self.furthest), 1.0)

    def _features(self, scores: FloatArray) -> FloatArray:
        """The terms in which the output is linear: the hidden units' activations, the scores and a one."""
        return np.concatenate([np.tanh(self._hidden @ scores), scores])

    def _step(self, scores: FloatArray, features: FloatArray, error: float) -> None:
        activations = features[: self.hidden]
        slopes = self._output[: self.hidden] * (1.0 - activations * activations)
        # The gradient of hidden unit j is its slope times the scores: one product serves all units.
        hidden = (self._hidden_covariance @ scores) * slopes[:, np.newaxis]
        output = self._output_covariance @ features
        expected = self._noise + float(slopes @ (hidden @ scores)) + float(output @ features)
        limit = self.furthest * math.sqrt(expected)
        error = min(max(error, -limit), limit)
        self._hidden += error / expected * hidden
        self._output += error / expected * output
        # Halved evenly between both sides of the product, which keeps the covariances symmetric to the last bit.
        hidden, output = hidden / math.sqrt(expected), output / math.sqrt(expected)
        self._hidden_covariance -= hidden[:, :, np.newaxis] * hidden[:, np.newaxis, :]
        self._output_covariance -= output[:, np.newaxis] * output
        self._noise = max(self._noise + (error * error - self._noise) / 50, _LEAST_NOISE)

    def _forget(self) -> None:
        """Move weights and covariances a little back to their first values."""
        kept, first = self.retention, _first_weights(self.hidden, self.width)
        self._hidden += (1.0 - kept) * (first[0] - self._hidden)
        self._output += (1.0 - kept) * (first[1] - self._output)
        for covariance, variance in zip(
            (self._hidden_covariance, self._output_covariance), self.variances, strict=True
        ):
            covariance *= kept**2
            covariance += (1.0 - kept**2) * variance * np.eye(covariance.shape[-1])


@cache
def _first_weights(units: int, width: int) -> tuple[FloatArray, FloatArray]:
    """Initial weights of the hidden units and of the output, drawn from a fixed seed."""
    random = np.random.Generator(np.random.Philox(_SEED))
    hidden = random.normal(0.0, width**-0.5, (units, width + 1))
    return hidden, np.concatenate([random.normal(0.0, 0.3, units), np.zeros(width + 1)])
