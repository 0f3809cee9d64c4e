"""What must not reach the parameter servers."""

import warnings
from collections.abc import Callable
from typing import Final, final

from evenstep.core.errors import EvenstepError
from evenstep.schemes import Served
from evenstep.worker.iteration import Iteration
from evenstep.worker.tracker import Tracker

_MAX_SKIPPED: Final = 100
"""Pushes in a row that a worker may skip; a GradScaler finds its scale in fewer."""


@final
class NonfiniteGradientError(EvenstepError, FloatingPointError):
    """A gradient holds a NaN or an infinity, and the scheme refuses such gradients."""


@final
class DivergedError(EvenstepError, FloatingPointError):
    """Training cannot continue: the weights, or too many gradients in a row, hold a NaN or an infinity."""


@final
class NonfiniteGuard:
    """Skips pushes whose gradient holds a NaN or an infinity, or refuses them if the scheme says so.

    `finite`: returns whether no weight holds a NaN or an infinity.
    """

    def __init__(self, served: Served, balancer: Tracker, finite: Callable[[], bool]) -> None:
        self._refuses = served.nonfinite == "refuse"
        self._balancer = balancer
        self._finite = finite
        self._in_a_row = 0

    def passed(self) -> None:
        """A finite gradient is pushed."""
        self._in_a_row = 0

    def skip(self, now: Iteration) -> None:
        """The gradient of this iteration is not finite and is not pushed.

        Raises:
            NonfiniteGradientError: The scheme refuses such gradients.
            DivergedError: The weights are not finite, or no gradient has been for a long time.
        """
        worker = self._balancer.workers.rank
        if self._refuses:
            raise NonfiniteGradientError(
                f"the gradient of iteration {now.number} on worker {worker} holds a NaN or an infinity:"
                " lower the learning rate or the loss's scale, or have such pushes skipped with nonfinite=skip"
            )
        self._balancer.skipped += 1
        self._in_a_row += 1
        if self._in_a_row == _MAX_SKIPPED or not self._finite():
            raise DivergedError(
                f"training has diverged by iteration {now.number} of worker {worker}: the weights hold a NaN"
                f" or an infinity, or {_MAX_SKIPPED} gradients in a row did; lower the learning rate, and go on from"
                " the last snapshot with evenstep run --resume"
            )
        if self._balancer.skipped == 1:
            warnings.warn(
                f"worker {worker} left out a push whose gradient holds a NaN or an infinity; further ones"
                " are counted in loader.statistics()",
                stacklevel=2,
            )
