"""Detects a loss that is not the mean over the worker's own batch; its gradient would be weighed wrongly."""

import gc
import warnings
from typing import Any, Final, final

import numpy as np
import torch
import torch.distributed as dist

from evenstep.core.errors import ConfigError
from evenstep.core.loss_scale import is_in_order, is_mean, is_mean_by_norms
from evenstep.core.shown import shown
from evenstep.torch.engines.traces import Inputs
from evenstep.torch.engines.weighting import current_backward
from evenstep.torch.processes.workers import Workers, of_all
from evenstep.worker.hand_outs import HandedOut

_UNLIKE: Final = 1.2
"""The least ratio of the largest batch to the smallest for which an iteration is informative."""
_LOOKS: Final = (20, 40, 80, 160)
"""The number of such iterations after which the workers compare what they saw, until it is sure."""
_ZERO: Final = torch.zeros((), dtype=torch.float64)
_UNKNOWN: Final = torch.full((2,), torch.nan, dtype=torch.float64)
_ADVICE: Final = "docs/losses.md has the settings"


@final
class LossScale:
    """Looks at iterations with unequal sizes until it is sure how the loss is scaled; sends nothing before `compare`.

    It looks at three things: how the gradients at the model's outputs (or at its parameters, if the outputs have no
    rows) differ between large and small batches, whether the script communicates over the default group between the
    forward pass and its backward, and whether the model is given rows of another loader.

    Attributes:
        looks: Whether the current iteration is looked at.
        over: Whether nothing more is to be looked at.
    """

    def __init__(self, workers: Workers, *, by_norms: bool, sharded: bool) -> None:
        self.looks = self.over = False
        self._by_norms = by_norms  # Not with BatchNorm, where small batches have small gradients.
        self._workers = workers
        self._sizes: list[list[int]] = []
        self._levels: list[torch.Tensor] = []
        """Of each iteration, as in `_level_of`."""
        self._norms: list[torch.Tensor] = []
        self._batch: HandedOut | None = None
        self._of_backward: dict[int, torch.Tensor] = {}
        """By backward pass, since one of `torch.autograd.grad`, as for a penalty, does not reach the parameters."""
        self._level: torch.Tensor | None = None
        self._norm = _ZERO
        """The norm of the parameters' weighed gradient, from backward passes whose outputs have no rows."""
        # A model that is sharded communicates over the default group itself.
        self._group: Any = None if workers.given_group is not None or sharded else dist.group.WORLD
        self._calls = self._foreign = 0

    def begins(self, batch: HandedOut) -> None:
        """Note that this batch is computed from now on."""
        smallest, *_, largest = sorted(batch.share.sizes.tolist())
        unlike = largest >= _UNLIKE * smallest > 0
        self.looks = unlike and batch.units is None and batch.piece.cost is None
        self._batch, self._level, self._norm = batch, None, _ZERO
        self._of_backward.clear()
        self.loss_begins()

    def forward_begins(self, given: Inputs) -> None:
        """Note the inputs of a model."""
        self._warn_of_communication()
        self._foreign += self._batch is not None and given.foreign(self._batch)

    def loss_begins(self) -> None:
        """Note that communication from now on until the backward is the script's own."""
        if self._group is not None:
            self._calls = _calls_of(self._group)

    def backward_begins(self, gradient: torch.Tensor) -> None:
        """Note that a backward has reached an output of a model."""
        self._warn_of_communication()
        assert self._batch is not None
        samples, backward = self._batch.share.samples, current_backward()
        if len(self._batch.piece.positions) == samples and backward not in self._of_backward:
            # Of outputs that are split over a worker's peers, the part here: the whole would need communication.
            part = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            level = _level_of(part.detach(), samples)
            if level is not None:
                self._of_backward[backward] = level

    def summed(self, gradients: torch.Tensor) -> None:
        """Note the gradients that this backward has reached, which are weighed and will be summed over the workers."""
        level = self._of_backward.get(current_backward())
        if level is not None:
            self._level = level
        elif self._by_norms and not gradients.is_sparse:
            self._norm = torch.hypot(self._norm.to(gradients.device), _norms_of(gradients))

    def _warn_of_communication(self) -> None:
        if self._group is not None and _calls_of(self._group) != self._calls:
            self._group = None
            warnings.warn(
                "the script communicates between its batch and the backward. If its loss is divided by what all"
                ' workers have, or compares samples of all of them, give prepare(..., weights="script"):'
                f" {_ADVICE}. A mean over the worker's own batch is right as it is",
                stacklevel=2,
            )

    def ends(self) -> bool:
        """End the iteration, on all workers; returns whether they are to `compare` what they saw."""
        assert self._batch is not None
        self._sizes.append(self._batch.share.sizes.tolist())
        self._levels.append(_UNKNOWN if self._level is None else self._level)
        self._norms.append(self._norm)
        self.looks = False
        if len(self._sizes) == _LOOKS[0] <= self._foreign and _loops_over_another_loader():
            warnings.warn(
                "in each iteration the model was given rows that the prepared loader did not hand out, as of another"
                " loader beside it in a zip. They count by this worker's samples of the prepared loader: prepare that"
                " loader too, and run a backward for each batch (docs/sessions.md)",
                stacklevel=2,
            )
        return len(self._sizes) in _LOOKS

    def compare(self) -> None:
        """Decide whether the loss is a mean; all workers must call it together.

        Raises:
            ConfigError: The loss is not the mean over the worker's own batch.
        """
        sizes = np.array(self._sizes)
        mine = [[*level.tolist(), float(norm)] for level, norm in zip(self._levels, self._norms, strict=True)]
        told = of_all(self._workers, torch.tensor(mine, dtype=torch.float64))
        levels, trends, norms = told.numpy().transpose(2, 1, 0)
        mean = None if is_in_order(trends) else is_mean(sizes, levels)
        if mean is None:
            mean = is_mean_by_norms(sizes, norms / sizes)  # They are weighed.
        self.over = mean is not None or len(self._sizes) == _LOOKS[-1]
        if mean is False:
            raise ConfigError(
                f"the loss is not the mean over the worker's own batch: in {len(self._sizes)} iterations with batches"
                f" such as {shown(self._sizes[-1])} its gradient does not fall as batches grow, and unlike batches"
                " would be weighed wrongly. Divide by the samples at hand, such as len(x), not by a constant; or, if"
                f' the script divides by the samples of all workers, give prepare(..., weights="script"): {_ADVICE}'
            )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _calls_of(group: Any) -> int:
    """The number of collectives of this group so far."""
    return int(group._get_sequence_number_for_group())


def _level_of(gradient: torch.Tensor, samples: int) -> torch.Tensor | None:
    """The mean log norm of the samples' gradients, and that of the first half of them less that of the second.

    Gradients of zero do not count. None if no axis has the samples.
    """
    if gradient.ndim and not gradient.shape[0] % samples:
        rows = gradient.reshape(samples, -1)  # A sample may have several consecutive rows.
    elif gradient.ndim > 1 and gradient.shape[1] == samples:
        rows = gradient.transpose(0, 1).reshape(samples, -1)
    else:
        return None
    norms = _norms_of(rows, dim=1)
    counted = norms > 0
    logs = torch.where(counted, norms.log(), 0.0)
    halves = torch.stack([logs[: samples // 2].sum(), logs[samples // 2 :].sum()])
    counts = torch.stack([counted[: samples // 2].sum(), counted[samples // 2 :].sum()])
    first, second = halves / counts
    return torch.stack([halves.sum() / counts.sum(), first - second])


def _norms_of(values: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    wide = torch.promote_types(values.dtype, torch.float32)
    norms: torch.Tensor = torch.linalg.vector_norm(values, dim=dim, dtype=wide).double()
    return norms


def _loops_over_another_loader() -> bool:
    """True if the script is in a loop over a DataLoader that was not prepared."""
    loops = [
        each for each in gc.get_objects() if issubclass(type(each), torch.utils.data.dataloader._BaseDataLoaderIter)
    ]
    return not all(type(each._dataset).__module__.startswith("evenstep.") for each in loops)
