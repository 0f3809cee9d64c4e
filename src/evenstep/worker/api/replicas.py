"""Compares the workers' replicas of a model: a script may change weights, or how they are stepped, on one alone."""

from collections.abc import Callable, Mapping
from typing import Any, Final, final

import numpy as np

from evenstep.core.replicas import Looks, require_same_weights
from evenstep.core.values import FloatArray
from evenstep.worker.api.gather import Gather

_ROUNDING: Final = {2: 2.0**-7, 4: 2.0**-23, 8: 2.0**-52}
"""The relative rounding error by the bytes of a number; of two bytes, that of bfloat16."""


@final
class Replicas:
    """This worker's replica.

    Args:
        gather: Exchanges the sketches of weights.
        weights: Returns the floating-point weights that all workers must have alike, by name.
    """

    def __init__(self, gather: Gather, weights: Callable[[], Mapping[str, Any]]) -> None:
        self._gather, self._weights = gather, weights
        self._looks, self._steps = Looks(), 0

    def look(self) -> None:
        """Compare the weights in some iterations; all workers call it in each, before the optimizer steps.

        Raises:
            DisagreementError: They differ by more than rounding explains.
        """
        self._steps += 1
        if self._steps < self._looks.at:
            return
        self._looks.follow(self._steps)
        arrays = {name: np.asarray(each) for name, each in self._weights().items()}
        told = self._gather.records({"weights": [*map(_sketch, arrays.values())]})
        require_same_weights(
            np.array([each["weights"] for each in told]),
            np.array([_ROUNDING[each.itemsize] for each in arrays.values()]),
            [*arrays],
            remedy="also the learning rate, which may follow no loss of one worker's batch",
        )


def _sketch(weights: FloatArray) -> list[float]:
    """A sum of all elements, with factors by which differences do not cancel out, and the norm."""
    flat = weights.astype(np.float64).ravel()
    return [float(flat @ np.sin(np.arange(1.0, flat.size + 1))), float(np.linalg.norm(flat))]
