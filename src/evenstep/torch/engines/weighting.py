"""Weighs a worker's gradient by its share of the samples, even if several backwards share one synchronisation."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, final

import torch
import torch.distributed as dist

from evenstep.core.errors import ConfigError
from evenstep.core.samples import WEIGHTINGS, Share
from evenstep.launch.c10d import GradBucket
from evenstep.schemes import Scheme
from evenstep.torch.engines.gradient_watch import ChangeWatch, GradientWatch
from evenstep.torch.engines.running_statistics import RunningStatistics
from evenstep.torch.processes.workers import Workers

if TYPE_CHECKING:
    from weakref import ReferenceType

    from evenstep.torch.engines.summing_group import SummingGroup

Weights: TypeAlias = Literal["samples", "script"]
"""`samples`: as the scheme weighs gradients. `script`: all equally, for a loss that is normalised over all workers."""


def weight_function(
    weights: Weights, scheme: Scheme, workers: int, accumulation: int
) -> tuple[Callable[[Share], float], float | None]:
    """Return the function from a share to the weight of its gradient, at least 0, and what a part's portion multiplies.

    The script divides losses by `accumulation`. If it normalises them over all workers itself, each part weighs alike.
    """
    if weights == "script":
        return lambda share: 1 / workers if share.samples else 0.0, None
    return WEIGHTINGS[scheme.weighting], accumulation


def current_backward() -> int:
    """The number of the backward pass that runs in this thread."""
    return torch._C._current_graph_task_id()


@final
class SummedModel:
    """A model whose gradients are summed over the workers, each with its weight.

    The weight is x_i / X, so that the sum is the gradient of the union batch.

    Inside an accumulation window (`no_sync`) local gradients add up unweighted and are weighed once, in the
    synchronising backward. If a later batch of the window has another weight, the accumulated gradients are first
    rescaled by old weight over new. A weight of 0 never multiplies (0 x NaN is NaN): the gradient of that backward is
    replaced by what had accumulated before it, or by zeros.

    Without a window, a gradient may be added to one that is already a sum over the workers and the same on all of them.
    Multiplied by weights that do not sum to 1, that sum would change; `keep_sum` preserves it.

    Attributes:
        parameters: The trained parameters.
        watch: Finds gradients that are not summed; None if there is one worker.
        statistics: Averages the running statistics of BatchNorm; None if there are none.
        reduces: Whether the backward of the last forward pass will sum gradients over the workers; None if it has.
        expected: The same until that backward has begun.
        accumulating: Whether an accumulation window is open.
        weight: The weight of the next backward, unless it is `idle`, of weight 0.
        looked_at: Whether gradients at outputs were finite, by backward pass, or by None for an accumulation window.
        changes: Finds gradients that a script changes before others are added to them; None until others are.
        finite: Whether this worker's gradient counted in the last sum, a boolean on its device; None if it did.
        kept: The gradients of a window before a batch without weight.
        group: In which DDP sums its gradients, and which refers to the engine; None if it does so by a hook.
        bytes: Those of all gradients in that group.
        sent: Those that the backward of the last forward pass has summed.
        last_place: The address of the last bucket there, when it was first summed.
        last_sum: That operation.

    Source: LB-BSP (arXiv 1806.02508), gradient aggregation: sum of (x_i / X) g_i. DDP itself divides by N.
    """

    def __init__(self, model: torch.nn.Module, workers: Workers) -> None:
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._workers = workers.count
        self.watch = GradientWatch(model) if workers.count > 1 else None
        statistics = RunningStatistics(model, workers)
        self.statistics = statistics if workers.count > 1 and statistics.norms else None
        self.reduces: bool | None = None
        self.group: ReferenceType[SummingGroup] | None = None
        self.bytes = self.sent = self.last_place = 0
        self.last_sum: Any = None
        self.weight = 1.0
        self.idle = False
        self.accumulating = False
        self.finite: torch.Tensor | None = None
        self.looked_at: dict[int | None, torch.Tensor] = {}
        self.kept: dict[torch.Tensor, torch.Tensor] = {}
        self.changes: ChangeWatch | None = None
        self.expected = False
        self._sums: dict[torch.Tensor, torch.Tensor] = {}

    def forget_looks(self) -> None:
        """Forget whether gradients were finite: a new one begins."""
        self.finite = None
        self.looked_at.clear()

    def adds_up(self) -> None:
        """Note that other batches will add to the gradient of the next backward before it is summed."""
        if self.changes is None and any(each.requires_grad for each in self.parameters):
            self.changes = ChangeWatch(self.parameters)

    def begins(self, changes: ChangeWatch, *, first: bool) -> None:
        """Note that a batch begins, whose gradient is the first one of a step or is added to others.

        Raises:
            ConfigError: It would be added to one that the script has changed.
        """
        if changes.changed() and (self.accumulating or not first):
            raise ConfigError(
                "the gradients were changed between two batches of a step, as by clip_grad_norm_ in every pass, while"
                " each worker has only its own part of them: clip after the last backward of a step, under"
                " `if loader.synchronises:` or outside no_sync (in Accelerate, `if accelerator.sync_gradients:`)"
            )

    def keep_sum(self) -> None:
        """Begin a backward whose weights may not sum to 1; earlier sums stay as they are."""
        if self.expected and not self.accumulating:
            gradients = ((parameter, parameter.grad) for parameter in self.parameters)
            self._sums = {parameter: grad.clone() for parameter, grad in gradients if grad is not None}
            if self._sums:
                self.look()
        self.expected = False

    def look(self) -> None:
        """Before a backward, note which parameters a bucket holds."""
        if self.group is not None and (group := self.group()) is not None:
            group.look()

    def close(self) -> None:
        """Remove the hooks, which autograd keeps alive."""
        if self.changes is not None:
            self.changes.close()
        if self.watch is not None:
            self.watch.close()

    def set(self, weight: float) -> None:
        """Set the weight of the next backward."""
        if self.idle and self.accumulating:
            for parameter in self.parameters:
                parameter.grad = self.kept.get(parameter)
        if self.accumulating and weight == 0:
            gradients = ((parameter, parameter.grad) for parameter in self.parameters)
            self.kept = {parameter: grad.clone() for parameter, grad in gradients if grad is not None}
        elif self.accumulating and self.weight not in (0, weight):
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(self.weight / weight)
        else:
            self.kept = {}
        self.idle = weight == 0
        if not (self.idle and self.accumulating):
            self.weight = weight

    def set_first(self, weight: float) -> None:
        """Set the weight of the first backward of a window, whatever gradients are left of earlier ones."""
        self.kept, self.idle, self.weight = {}, weight == 0, weight

    def divide(self, total: float) -> None:
        """Divide the gradients that have accumulated."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.div_(total)

    def apply_by_itself(self) -> None:
        """Weigh every gradient before it is accumulated, from now on; for a single worker, without windows."""

        def weighed(gradient: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(gradient) if self.idle else gradient * self.weight

        for parameter in self.parameters:
            parameter.register_hook(weighed)  # type: ignore[no-untyped-call]

    def apply_whole(self, gradients: torch.Tensor) -> None:
        """Weigh gradients of a single backward in place."""
        if self.idle:
            gradients.zero_()
        else:
            gradients.mul_(self.weight)
        if self.looked_at:
            self._leave_out(gradients)

    def look_at(self, finite: torch.Tensor) -> None:
        """Note whether the gradient at an output of the current backward is finite."""
        backward = None if self.accumulating else current_backward()
        self.looked_at[backward] = self.looked_at[backward] & finite if backward in self.looked_at else finite

    def take_finite(self) -> torch.Tensor | None:
        """Return `finite`, and reset it."""
        finite, self.finite = self.finite, None
        return finite

    def _leave_out(self, gradients: torch.Tensor) -> None:
        # A backward of `torch.autograd.grad`, as for a penalty, does not get here.
        for backward in (None, current_backward()):
            if (finite := self.looked_at.get(backward)) is not None:
                self.finite = finite
                values = gradients._values() if gradients.is_sparse else gradients
                values.masked_fill_(~finite, 0.0)

    def apply(self, buffer: torch.Tensor, bucket: GradBucket | None, scale: float = 1.0) -> None:
        """Weigh the gradients of a bucket in place, which are its `buffer`, times `scale`.

        Without `bucket` DDP has divided them by the number of workers.
        """
        divisor = self._workers if bucket is None else 1
        if self.idle:
            self._replace(buffer, bucket, scale)
        elif (factor := self.weight * scale) != 1 / divisor:
            # Without a divisor the same operation as DDP's own division, so equal sizes give the same bits either way.
            buffer.mul_(factor * divisor)
        if self.looked_at:
            self._leave_out(buffer)
        if self._sums and not buffer.is_sparse:
            weight = 0.0 if self.idle else self.weight
            for parameter, gradient in self._parts(buffer, bucket):
                if (total := self._sums.pop(parameter, None)) is not None:
                    gradient.add_(total, alpha=scale * (1 / self._workers - weight))

    def _replace(self, buffer: torch.Tensor, bucket: GradBucket | None, scale: float) -> None:
        """Replace the gradients of a backward without weight by those that had accumulated before it."""
        buffer.zero_()
        if not self.kept:
            return
        if bucket is not None and buffer.is_sparse:  # The bucket then holds one parameter, and has no views.
            if any(parameter in self.kept for parameter in bucket.parameters()):
                raise ConfigError(
                    "a worker without samples cannot add sparse gradients of earlier batches: use sparse=False, or one"
                    " batch in a step"
                )
            return
        for parameter, gradient in self._parts(buffer, bucket):
            if parameter in self.kept:
                gradient.copy_(self.kept[parameter]).mul_(self.weight * scale)

    def _parts(self, buffer: torch.Tensor, bucket: GradBucket | None) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """The parameters of a bucket, each with the part of the buffer that is its gradient."""
        if bucket is not None:
            return zip(bucket.parameters(), bucket.gradients(), strict=True)
        group = None if self.group is None else self.group()
        if group is None or (parameters := group.parameters.get(self.sent)) is None:
            raise ConfigError(
                "a worker without samples keeps the gradients of earlier batches of a step, for which the model's"
                " outputs must be tensors, or tuples, lists, dicts or dataclasses of them"
            )
        parts = buffer.split([each.numel() for each in parameters])  # type: ignore[no-untyped-call]
        return ((each, part.view_as(each)) for each, part in zip(parameters, parts, strict=True))


@final
class UnitCount:
    """This worker's units in its batch, the `count`, and those of all workers, exchanged in the background."""

    def __init__(self, count: float, group: dist.ProcessGroup | None) -> None:
        self.count, self._group = count, group
        own, workers = torch.tensor([count], dtype=torch.float64), 1 if group is None else group.size()
        self._counts = [own.clone() for _ in range(workers)]
        self._work: dist.Work | None = None

    def start(self) -> Self:
        """Start the exchange, once, between the same communications on all workers."""
        if self._work is None and self._group is not None:
            # Gathered, not summed: workers without a count sum a bucket now, and Gloo would abort for its other length.
            self._work = dist.all_gather(self._counts, self._counts[0].clone(), group=self._group, async_op=True)
        return self

    def total(self) -> float:
        """The units of all workers; 1 if there are none, as for a loss divided by max(count, 1).

        Raises:
            RuntimeError: The exchange with the other workers failed.
        """
        self.start()
        if self._work is not None:
            self._work.wait()
        return sum(map(float, self._counts)) or 1.0
