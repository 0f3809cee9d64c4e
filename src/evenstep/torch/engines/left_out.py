"""Leaves out this worker's gradient of a batch if it holds a NaN or an infinity, where gradients are summed."""

from collections.abc import Sequence
from typing import final

import torch

from evenstep.tensors.messages import all_finite
from evenstep.torch.engines.weighting import SummedModel
from evenstep.worker.nonfinite import NonfiniteGuard
from evenstep.worker.tracker import Tracker


@final
class LeftOut:
    """Looks at the gradients at the outputs of the models, which leave out those that are not finite.

    Args:
        nonfinite: What the scheme says of such gradients, `skip` or `refuse`.

    Attributes:
        due: Whether `before_step` has something to do: a gradient may not be finite, or the last ones were not.
    """

    def __init__(self, nonfinite: str, tracker: Tracker, models: Sequence[SummedModel]) -> None:
        self._guard = NonfiniteGuard(nonfinite, tracker)
        self._tracker = tracker
        self._models = models
        self.due = False
        self._finite_before: torch.Tensor | None = None

    def look_at(self, model: int, total: torch.Tensor) -> None:
        """Look at the sum of the gradient at an output of this model, at which its backward begins, if it may matter.

        In float16 it does not: an infinity must reach all workers, as it tells all GradScalers to lower their scale.
        """
        self.due = True
        self._models[model].look_at(total.isfinite())

    def before_step(self) -> None:
        """Count what was left out since the last step.

        Raises:
            NonfiniteGradientError: The scheme refuses such gradients.
            DivergedError: See `NonfiniteGuard.skip`.
        """
        now = self._tracker.iteration
        if now is None:
            return
        found = [finite for model in self._models if (finite := model.take_finite()) is not None]
        finite = torch.stack(found).all() if found else None
        if finite is not None and not finite.is_cpu:
            finite, self._finite_before = self._finite_before, finite  # The host does not wait for its device.
        if finite is None or finite:
            self._guard.passed()
        else:
            self._guard.skip(now, finite=all_finite(each for model in self._models for each in model.parameters))
        self.due = self._guard.in_a_row > 0
