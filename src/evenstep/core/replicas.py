"""Decides when workers compare the replicas of their models, and whether these are alike."""

from collections.abc import Sequence
from typing import Final, final

import numpy as np

from evenstep.core.errors import DisagreementError
from evenstep.core.values import FloatArray
from evenstep.core.workers import name_workers

_APART: Final = 1e-4
"""The least relative difference of float32 weights that counts. Devices that round differently stay far below it."""


@final
class Looks:
    """Says in which iterations to look: the first, then 2, 4 and so on after the last look, and at most `longest`.

    All workers step on the same gradients, so a difference neither grows nor vanishes by itself, and a look now and
    then finds it.

    Attributes:
        at: The next iteration to look in, or in the first one after it.
    """

    def __init__(self, *, longest: int = 1000) -> None:
        self.at, self._interval, self._longest = 0, 1, longest

    def follow(self, iteration: int) -> None:
        """Choose the next iteration after a look in this one.

        >>> looks = Looks(longest=4)
        >>> [looks.follow(looks.at) or looks.at for _ in range(4)]
        [2, 6, 10, 14]
        """
        self._interval = min(2 * self._interval, self._longest)
        self.at = iteration + self._interval


def require_same_weights(
    sketches: FloatArray,
    rounding: FloatArray,
    names: Sequence[str],
    remedy: str = "decide by loader.mean_over_workers, draw from one seed",
) -> None:
    """Check that all workers have the same weights, except for what unlike devices round differently.

    Args:
        sketches: A sum and a norm of each parameter, of shape [workers, parameters, 2].
        rounding: The relative rounding error of each parameter's dtype, of shape [parameters].
        names: The parameters.
        remedy: How a script does so.

    Raises:
        DisagreementError: They differ. The message, the same on every worker, names the minority and a parameter.
    """
    sums, norms = sketches[..., 0], sketches[..., 1]
    allowed = np.maximum(_APART, 16 * rounding) * np.where(np.isfinite(norms), norms, 0).max(0)
    apart = ~np.isclose(sums, sums[0], rtol=0, atol=allowed, equal_nan=True).all(0)
    if apart.any():
        first = int(apart.argmax())
        like = np.isclose(sums[:, None, first], sums[None, :, first], rtol=0, atol=allowed[first], equal_nan=True)
        usual = int(like.sum(1).argmax())
        odd = np.flatnonzero(~like[usual]).tolist()
        raise DisagreementError(
            f"{name_workers(odd)} {'has' if len(odd) == 1 else 'have'} other weights in {names[first]} than"
            f" {name_workers([usual]) if len(sums) == 2 else 'the others'}: load weights, and change weights, gradients"
            f" or an optimizer's state, on every worker alike ({remedy})"
        )
