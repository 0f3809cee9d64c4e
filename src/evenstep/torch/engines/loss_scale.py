"""Notices a loss that is not the mean over the worker's own batch, for which its gradient would be weighed wrongly."""

import gc
import warnings
from typing import Any, Final, final

import numpy as np
import torch
import torch.distributed as dist

from evenstep.core.errors import ConfigError
from evenstep.core.loss_scale import is_mean
from evenstep.core.shown import shown
from evenstep.torch.engines.traces import Inputs
from evenstep.torch.engines.weighting import current_backward
from evenstep.torch.processes.workers import Workers, gather
from evenstep.worker.hand_outs import HandedOut

_UNLIKE: Final = 1.2
"""The largest batch over the smallest, from which on an iteration tells something."""
_LOOKS: Final = (20, 40, 80, 160)
"""After so many such iterations the workers compare what they saw, until it is sure."""
_ADVICE: Final = "docs/losses.md has the settings"


@final
class LossScale:
    """Looks at iterations with unlike sizes until it is sure how the loss is scaled. Nothing is sent before a look.

    Three things are looked at: how the gradients at the model's outputs differ between large and small batches, whether
    the script communicates over the default group between the forward pass and its backward, and whether the model is
    given rows of another loader.

    Attributes:
        looks: Whether the present iteration is looked at.
        over: Whether nothing more is to be looked at.
    """

    def __init__(self, workers: Workers) -> None:
        self.looks = self.over = False
        self._workers = workers
        self._sizes: list[list[int]] = []
        self._levels: list[torch.Tensor] = []
        self._batch: HandedOut | None = None
        self._of_backward: dict[int, torch.Tensor] = {}
        """By backward pass: one of `torch.autograd.grad`, as for a penalty, comes to no parameter."""
        self._level: torch.Tensor | None = None
        self._group: Any = None if workers.given_group is not None else dist.group.WORLD
        self._calls = self._foreign = 0

    def begins(self, batch: HandedOut) -> None:
        """This batch is computed from now on."""
        smallest, *_, largest = sorted(batch.share.sizes.tolist())
        unlike = largest >= _UNLIKE * smallest
        self.looks = unlike and batch.units is None and batch.piece.cost is None
        self._batch, self._level = batch, None
        self._of_backward.clear()
        self.loss_begins()

    def forward_begins(self, given: Inputs) -> None:
        """A model is given this."""
        self._warn_of_communication()
        self._foreign += self._batch is not None and given.foreign(self._batch)

    def loss_begins(self) -> None:
        """What is communicated from now on until the backward is the script's."""
        if self._group is not None:
            self._calls = self._group._get_sequence_number_for_group()

    def backward_begins(self, gradient: torch.Tensor) -> None:
        """A backward has come to an output of a model."""
        self._warn_of_communication()
        assert self._batch is not None
        samples, backward = self._batch.share.samples, current_backward()
        if len(self._batch.piece.positions) == samples and backward not in self._of_backward:
            level = _level_of(gradient.detach(), samples)
            if level is not None:
                self._of_backward[backward] = level

    def summed(self) -> None:
        """The present backward has come to the parameters, whose gradients are summed over the workers."""
        self._level = self._of_backward.get(current_backward(), self._level)

    def _warn_of_communication(self) -> None:
        if self._group is not None and self._group._get_sequence_number_for_group() != self._calls:
            self._group = None
            warnings.warn(
                "the script communicates between its batch and the backward. If its loss is divided by what all"
                ' workers have, or compares samples of all of them, give prepare(..., weights="script"):'
                f" {_ADVICE}. A mean over the worker's own batch is right as it is",
                stacklevel=2,
            )

    def ends(self) -> bool:
        """The iteration is over on all workers; returns whether they are to `compare` what they saw."""
        assert self._batch is not None
        self._sizes.append(self._batch.share.sizes.tolist())
        self._levels.append(torch.tensor(torch.nan, dtype=torch.float64) if self._level is None else self._level)
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
            ConfigError: The loss is no mean over the worker's own batch.
        """
        # Text takes no NaN.
        mine = [str(float(each)) for each in self._levels]
        levels = np.array([each["levels"] for each in gather(self._workers, {"levels": mine})], dtype=np.float64).T
        mean = is_mean(np.array(self._sizes), levels)
        self.over = mean is not None or len(self._sizes) == _LOOKS[-1]
        if mean is False:
            raise ConfigError(
                f"the loss is not the mean over the worker's own batch: in {len(self._sizes)} iterations with batches"
                f" such as {shown(self._sizes[-1])} its gradient does not fall as batches grow, and unlike batches"
                " would be weighed wrongly. Divide by the samples at hand, such as len(x), not by a constant; or, if"
                f' the script divides by the samples of all workers, give prepare(..., weights="script"): {_ADVICE}'
            )


def _level_of(gradient: torch.Tensor, samples: int) -> torch.Tensor | None:
    """The mean log norm of the samples' gradients, without those that are 0; None if no axis has the samples."""
    if gradient.ndim and not gradient.shape[0] % samples:
        rows = gradient.reshape(samples, -1)  # Several rows of a sample may follow each other.
    elif gradient.ndim > 1 and gradient.shape[1] == samples:
        rows = gradient.transpose(0, 1).reshape(samples, -1)
    else:
        return None
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.promote_types(gradient.dtype, torch.float32)).double()
    level: torch.Tensor = torch.where(norms > 0, norms.log(), 0.0).sum() / (norms > 0).sum()
    return level


def _loops_over_another_loader() -> bool:
    """Whether the script is in a loop over a DataLoader that was not prepared."""
    loops = [
        each for each in gc.get_objects() if issubclass(type(each), torch.utils.data.dataloader._BaseDataLoaderIter)
    ]
    return not all(type(each._dataset).__module__.startswith("evenstep.") for each in loops)
