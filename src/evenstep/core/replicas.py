"""Decides when workers compare the replicas of their models, and whether these are alike."""

from collections.abc import Sequence
from typing import Final, TypeAlias, final

import numpy as np

from evenstep.core.errors import DisagreementError
from evenstep.core.workers import name_workers

_APART: Final = 1e-4
"""The least relative difference of float32 weights that counts. Devices that round differently stay far below it."""
_LONGEST: Final = 1000
"""The most iterations from one look to the next."""

Sketch: TypeAlias = tuple[float, float, float]
"""A weighted sum of the elements of a parameter, their norm, and the relative rounding error of their dtype."""


@final
class Looks:
    """Says in which iterations to look: the first, then 2, 4 and so on after the last look, and at most 1000.

    All workers step on the same gradients, so a difference neither grows nor vanishes by itself, and a look now and
    then finds it.

    Attributes:
        at: The next iteration to look in, or in the first one after it.
    """

    def __init__(self) -> None:
        self.at, self._interval = 0, 1

    def follow(self, iteration: int) -> None:
        """Choose the next iteration after a look in this one.

        >>> looks = Looks()
        >>> [looks.follow(looks.at) or looks.at for _ in range(11)]
        [2, 6, 14, 30, 62, 126, 254, 510, 1022, 2022, 3022]
        """
        self._interval = min(2 * self._interval, _LONGEST)
        self.at = iteration + self._interval


def require_same_weights(told: Sequence[Sequence[Sketch]], names: Sequence[str], remedy: str) -> None:
    """Check that all workers have the same weights, except for what unlike devices round differently.

    Args:
        told: The sketches of each worker's parameters.
        names: The parameters.
        remedy: How a script keeps them alike, as the end of the message.

    Raises:
        DisagreementError: They differ. The message, the same on every worker, names the minority and a parameter.
    """
    sketches = np.array(told, dtype=np.float64).reshape(len(told), len(names), 3)
    sums, norms, rounding = np.moveaxis(sketches, -1, 0)
    allowed = np.maximum(_APART, 16 * rounding.max(0)) * np.where(np.isfinite(norms), norms, 0).max(0)
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
