"""Weighs a worker's gradient by its share of the samples, also if several backwards share one synchronisation."""

import math
from collections.abc import Callable, Iterable
from typing import TypeAlias, final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from evenstep.core.errors import ConfigError
from evenstep.core.samples import WEIGHTINGS, Share
from evenstep.core.shown import shown
from evenstep.launch.c10d import GradBucket
from evenstep.schemes import Scheme
from evenstep.torch.engines.large_gradients import LargeGradients

Weights: TypeAlias = str | Callable[[Share], float]
"""`samples`: as the scheme weighs gradients. `script`: all alike, for a loss that is normalised over all workers."""


def weight_function(weights: Weights, scheme: Scheme, workers: int) -> Callable[[Share], float]:
    """What the gradient of a share counts, at least 0."""
    if weights == "samples":
        return WEIGHTINGS[scheme.weighting]
    of_share = (lambda _: 1 / workers) if isinstance(weights, str) else weights

    def weight(share: Share) -> float:
        given = of_share(share) if share.samples else 0.0
        try:
            value = float(given)
        except (TypeError, ValueError):
            value = math.nan
        if not 0 <= value < math.inf:
            raise ConfigError(f"the function given as weights returned {shown(given)}: a weight is a number >= 0")
        return value

    return weight


def current_backward() -> int:
    """The number of the backward pass that runs in this thread."""
    return torch._C._current_graph_task_id()


@final
class GradientWeight:
    """The weight of this worker's gradient: x_i / X, so that the sum over workers is the gradient of the union batch.

    Inside an accumulation window (`no_sync`) local gradients add up unweighted and are weighed once, in the
    synchronising backward. If a later batch of the window has another weight, the accumulated gradients are first
    rescaled by old weight over new. A weight of 0 never multiplies (0 x NaN is NaN): the gradient of that backward is
    replaced by what had accumulated before it, or by zeros.

    Without a window, a gradient may be added to one that is a sum over the workers already, the same on all of them.
    Multiplied by weights whose sum is not 1, that sum would change; `keep_sum` keeps it.

    Attributes:
        parameters: Those that are trained.
        accumulating: An accumulation window is open.
        finite: Whether this worker's gradient counted in the last sum, a boolean on its device; None if it did.

    Source: LB-BSP (arXiv 1806.02508), gradient aggregation: sum of (x_i / X) g_i. DDP itself divides by N.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._weight = 1.0
        self._idle = False
        self.accumulating = False
        self.finite: torch.Tensor | None = None
        self._looked_at: dict[int | None, torch.Tensor] = {}
        """Whether gradients at outputs were finite, by backward pass; under None those of an accumulation window."""
        self._kept: dict[torch.Tensor, torch.Tensor] = {}
        self._expected = False
        self._sums: dict[torch.Tensor, torch.Tensor] = {}
        self._large: LargeGradients | None = None

    def weigh_on_the_way(self, replica: DistributedDataParallel) -> None:
        """From now on weigh large gradients on their way into the buckets of this replica, of which they are views."""
        self._large = LargeGradients(self.parameters, replica)

    def begin(self, *, synchronises: bool) -> None:
        """A forward pass begins, and the weight of its backward is known."""
        if self._large is not None:
            self._large.begin(self._weight if synchronises and not self._idle else None)

    def expect(self, *, synchronises: bool) -> None:
        """The backward of a forward pass that begins now will, or will not, be summed over the workers."""
        self._expected = synchronises

    def keep_sum(self) -> None:
        """A backward begins whose weights may not sum to 1: what earlier ones summed stays as it is."""
        if self._expected and not self.accumulating:
            gradients = ((parameter, parameter.grad) for parameter in self.parameters)
            self._sums = {parameter: grad.clone() for parameter, grad in gradients if grad is not None}
        self._expected = False

    def leave(self) -> None:
        """The weight may change before the gradients are in their buckets, or they are there."""
        if self._large is not None:
            self._large.weight = None

    def close(self) -> None:
        """Remove the hooks."""
        if self._large is not None:
            self._large.close()

    def set(self, weight: float) -> None:
        """The weight of the next backward."""
        if self._idle and self.accumulating:
            for parameter in self.parameters:
                parameter.grad = self._kept.get(parameter)
        if self.accumulating and weight == 0:
            gradients = ((parameter, parameter.grad) for parameter in self.parameters)
            self._kept = {parameter: grad.clone() for parameter, grad in gradients if grad is not None}
        elif self.accumulating and self._weight not in (0, weight):
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(self._weight / weight)
        else:
            self._kept = {}
        self._idle = weight == 0
        if not (self._idle and self.accumulating):
            self._weight = weight
        if self._large is not None:
            self._large.weight = None

    def apply_by_itself(self) -> None:
        """From now on weigh every gradient before it is accumulated: for a single worker, without windows."""
        for parameter in self.parameters:
            parameter.register_hook(lambda gradient: gradient * self._weight)  # type: ignore[no-untyped-call]

    def apply_whole(self, gradients: torch.Tensor) -> None:
        """Weigh gradients of a single backward in place."""
        if self._idle:
            gradients.zero_()
        else:
            gradients.mul_(self._weight)
        self._leave_out(gradients)

    def look_at(self, finite: torch.Tensor) -> None:
        """The present backward came to an output with a gradient that is finite or not."""
        backward = None if self.accumulating else current_backward()
        self._looked_at[backward] = self._looked_at[backward] & finite if backward in self._looked_at else finite

    def forget(self) -> None:
        """Another gradient begins, unless an accumulation window is open."""
        if not self.accumulating:
            self.finite = None
            self._looked_at.clear()

    def take_finite(self) -> torch.Tensor | None:
        """As `finite`, once."""
        finite, self.finite = self.finite, None
        return finite

    def _leave_out(self, gradients: torch.Tensor) -> None:
        # A backward of `torch.autograd.grad`, as for a penalty, does not come here.
        for backward in (None, current_backward()) if self._looked_at else ():
            if (finite := self._looked_at.get(backward)) is not None:
                self.finite = finite
                values = gradients._values() if gradients.is_sparse else gradients
                values.masked_fill_(~finite, 0.0)

    def apply(self, bucket: GradBucket, scale: float = 1.0, workers: int = 1) -> None:
        """Weigh the gradients of a bucket in place, times `scale`."""
        self._weigh(bucket, scale)
        self._leave_out(bucket.buffer())
        if not self._sums or bucket.buffer().is_sparse:
            return
        weight = 0.0 if self._idle else self._weight
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if (total := self._sums.pop(parameter, None)) is not None:
                gradient.add_(total, alpha=scale * (1 / workers - weight))

    def _weigh(self, bucket: GradBucket, scale: float) -> None:
        buffer = bucket.buffer()
        if not self._idle:
            # The same operation as DDP's own division, so equal sizes give the same bits.
            if self._large is None:
                buffer.mul_(self._weight * scale)
            else:
                self._large.finish(bucket, buffer, self._weight * scale)
            return
        buffer.zero_()
        if buffer.is_sparse:  # Then the bucket is one parameter's, and has no views.
            if any(parameter in self._kept for parameter in bucket.parameters()):
                raise ConfigError(
                    "a worker without samples cannot add sparse gradients of earlier batches: use sparse=False, or one"
                    " batch in a step"
                )
            return
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if parameter in self._kept:
                gradient.copy_(self._kept[parameter]).mul_(self._weight * scale)


@final
class UnitCount:
    """The units that this worker counted in its batch, and their total over all workers, summed in the background."""

    def __init__(self, count: float, group: dist.ProcessGroup | None) -> None:
        self._count = count
        self._total = torch.tensor([count], dtype=torch.float64)
        self._work = None if group is None else dist.all_reduce(self._total, group=group, async_op=True)

    def weight(self) -> float:
        """This worker's part of the total; 0 if no worker counted any, as for a loss divided by max(count, 1).

        Raises:
            RuntimeError: The sum over the workers failed.
        """
        if self._work is not None:
            self._work.wait()
        return self._count / (float(self._total) or 1.0)
