"""Detects a loss that is not the mean over the worker's own batch; its gradient would be weighed wrongly."""

import gc
import warnings
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType
from typing import Any, Final, final

import numpy as np
import torch
import torch.distributed as dist

from evenstep.core.errors import ConfigError
from evenstep.core.loss_scale import is_divided_alike, is_in_order, is_mean, is_mean_by_norms
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
_ZEROS: Final = torch.zeros(2, dtype=torch.float64)
_UNKNOWN: Final = torch.full((2,), torch.nan, dtype=torch.float64)
_ADVICE: Final = "docs/losses.md has the settings"


@final
@dataclass(slots=True)
class _Look:
    """What this worker has seen in an iteration.

    Attributes:
        sizes: Of all workers.
        level: As in `_level_of`; NaN if unknown.
        norm: The norm of the parameters' weighed gradient, from backward passes whose outputs have no rows.
        ratio: This worker's targets, and its samples, over what their means are divided by; 0 if unknown.
    """

    sizes: list[int]
    level: torch.Tensor = _UNKNOWN
    norm: torch.Tensor = _ZERO
    ratio: torch.Tensor = _ZEROS


@final
class LossScale:
    """Looks at iterations with unequal sizes until it is sure how the loss is scaled; sends nothing before `compare`.

    It looks at four things: how the gradients at the model's outputs (or at its parameters, if the outputs have no
    rows) differ between large and small batches, what PyTorch's means of cross entropies are divided by, whether the
    script communicates over the default group between the forward pass and its backward, and whether the model is given
    rows of another loader.

    Attributes:
        looks: Whether the current iteration is looked at.
        over: Whether nothing more is to be looked at.
    """

    def __init__(self, workers: Workers, *, by_norms: bool, sharded: bool) -> None:
        self.looks = self.over = False
        self._by_norms = by_norms  # Not with BatchNorm, where small batches have small gradients.
        self._workers = workers
        self._looks: list[_Look] = []
        """Of the iterations so far."""
        self._now = _Look([])
        self._usual: dict[str, Any] = {}
        """PyTorch's own losses, by name, while wrappers are in their place."""
        self._batch: HandedOut | None = None
        self._of_backward: dict[int, torch.Tensor] = {}
        """By backward pass, since one of `torch.autograd.grad`, as for a penalty, does not reach the parameters."""
        # A model that is sharded communicates over the default group itself.
        self._group: Any = None if workers.given_group is not None or sharded else dist.group.WORLD
        self._calls = self._foreign = 0

    def begins(self, batch: HandedOut) -> None:
        """Note that this batch is computed from now on."""
        smallest, *_, largest = sorted(sizes := batch.share.sizes.tolist())
        unlike = largest >= _UNLIKE * smallest > 0
        self.looks = unlike and batch.units is None and batch.piece.cost is None
        self._batch = batch
        if self.looks:
            self._now = _Look(sizes)
        self._of_backward.clear()
        if self._usual:
            self.rests()
        for name in ("cross_entropy_loss", "nll_loss_nd") if self.looks else ():
            usual = getattr(torch._C._nn, name)
            if isinstance(usual, BuiltinFunctionType):  # Otherwise it is wrapped by the script or by another run.
                self._usual[name] = usual
                setattr(torch._C._nn, name, partial(self._loss, usual, batch.share.samples))
        self.loss_begins()

    def rests(self) -> None:
        """Give PyTorch its own losses back."""
        while self._usual:
            setattr(torch._C._nn, *self._usual.popitem())

    def _loss(self, usual: Any, samples: int, *given: Any, **named: Any) -> Any:
        loss = usual(*given, **named)
        is_mean_of_classes = len(given) > 4 and given[3] == 1 and not given[1].is_floating_point()
        if is_mean_of_classes and type(loss) is torch.Tensor and loss.requires_grad:  # A compiler traces other classes.
            _, targets, weight, _, ignored, *_ = given
            counted = targets != ignored
            weights = counted if weight is None else weight.detach()[targets.where(counted, 0)] * counted
            counts = torch.tensor([targets.numel(), samples], device=loss.device)
            loss.register_hook(partial(self._arrives, counts / weights.double().sum()))  # type: ignore[no-untyped-call]
        return loss

    def _arrives(self, ratio: torch.Tensor, gradient: torch.Tensor) -> None:
        self._now.ratio = self._now.ratio.to(ratio.device) + gradient * ratio

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
            self._now.level = level
        elif self._by_norms and not gradients.is_sparse:
            self._now.norm = torch.hypot(self._now.norm.to(gradients.device), _norms_of(gradients))

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
        self._looks.append(self._now)
        self.looks = False
        self.rests()
        if len(self._looks) == _LOOKS[0] <= self._foreign and _loops_over_another_loader():
            warnings.warn(
                "in each iteration the model was given rows that the prepared loader did not hand out, as of another"
                " loader beside it in a zip. They count by this worker's samples of the prepared loader: prepare that"
                " loader too, and run a backward for each batch (docs/sessions.md)",
                stacklevel=2,
            )
        return len(self._looks) in _LOOKS

    def compare(self) -> None:
        """Decide whether the loss is a mean; all workers must call it together.

        Raises:
            ConfigError: The loss is not the mean over the worker's own batch.
        """
        sizes = np.array([each.sizes for each in self._looks])
        mine = [[*each.level.tolist(), float(each.norm), *each.ratio.tolist()] for each in self._looks]
        told = of_all(self._workers, torch.tensor(mine, dtype=torch.float64))
        levels, trends, norms, *ratios = told.numpy().transpose(2, 1, 0)
        mean = None if is_in_order(trends) else is_mean(sizes, levels)
        if mean is None:
            mean = is_mean_by_norms(sizes, norms / sizes)  # They are weighed.
        self.over = mean is not None or len(self._looks) == _LOOKS[-1]
        seen = f"in {len(self._looks)} iterations with batches such as {shown(self._looks[-1].sizes)}"
        if mean is False:
            raise ConfigError(
                f"the loss is not the mean over the worker's own batch: {seen} its gradient does not fall as batches"
                " grow, and unlike batches would be weighed wrongly. Divide by the samples at hand, such as len(x), not"
                " by a constant; or, if the script divides by the samples of all workers, give prepare(...,"
                f' weights="script"): {_ADVICE}'
            )
        if not any(map(is_divided_alike, ratios)):
            raise ConfigError(
                "the loss is a mean over weights of classes, or over targets that are not ignored, whose sum is not in"
                f" proportion to samples: {seen} gradients would be weighed wrongly. Before backward call"
                f" loader.weigh_by with weight[labels].sum() or (labels != ignore_index).sum(): {_ADVICE}"
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
