"""Keeps NaNs and infinities out of the weights of all workers."""

import warnings
from typing import Final, final

from evenstep.core.errors import EvenstepError
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
    """Counts what is left out because it holds a NaN or an infinity, or refuses it if the scheme says so.

    `what`: what that is, as in messages.

    Attributes:
        in_a_row: How many were left out since the last finite one.
    """

    def __init__(self, nonfinite: str, tracker: Tracker, what: str = "gradient") -> None:
        self._what = what
        self._refuses = nonfinite == "refuse"
        self._tracker = tracker
        self.in_a_row = 0

    def passed(self) -> None:
        """Note a finite one, which counts."""
        self.in_a_row = 0

    def skip(self, now: Iteration, *, finite: bool) -> None:
        """Leave out this worker's one of this iteration; `finite`: its weights hold no NaN and no infinity.

        Raises:
            NonfiniteGradientError: The scheme refuses such gradients.
            DivergedError: The weights are not finite, or no gradient has been finite for a long time.
        """
        worker = self._tracker.workers.rank if self._tracker.place is None else self._tracker.place
        if self._refuses:
            raise NonfiniteGradientError(
                f"the {self._what} of iteration {now.number} on worker {worker} holds a NaN or an infinity:"
                f" lower the learning rate or the loss's scale, or have such {self._what}s left out with nonfinite=skip"
            )
        self._tracker.skipped += 1
        self.in_a_row += 1
        if self.in_a_row == _MAX_SKIPPED or not finite:
            raise DivergedError(
                f"training has diverged by iteration {now.number} of worker {worker}: the weights hold a NaN"
                f" or an infinity, or {_MAX_SKIPPED} {self._what}s in a row did; lower the learning rate, and go on"
                " from the last checkpoint (on servers, from the last snapshot with evenstep run --resume)"
            )
        if self._tracker.skipped == 1:
            warnings.warn(
                f"worker {worker} left out its {self._what} of iteration {now.number}, which holds a NaN or an"
                " infinity; further ones get no warning",
                stacklevel=2,
            )
