"""Weighs a worker's gradient by its share of the samples, also where several backwards share one synchronisation."""

from collections.abc import Iterable
from typing import final

import torch

from evenstep.launch.c10d import GradBucket


@final
class GradientWeight:
    """The weight of this worker's gradient: x_i / X, so that the sum over workers is the gradient of the union batch.

    Inside an accumulation window (`no_sync`) the local gradients add up unweighted and are weighed once, in the
    synchronising backward. Where a later slice of the window has another weight, what has accumulated is rescaled by
    old weight over new before the next backward. A weight of 0 never multiplies (0 x NaN is NaN): the gradient of that
    backward is replaced by what had accumulated before it, or by zeros.

    Source: LB-BSP (arXiv 1806.02508), gradient aggregation: sum of (x_i / X) g_i. DDP itself would divide by N.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._weight = 1.0
        self._idle = False
        self._open = False
        self._kept: dict[torch.Tensor, torch.Tensor] = {}

    def set(self, weight: float) -> None:
        """The weight of the next backward."""
        if self._idle and self._open:
            for parameter in self._parameters:
                parameter.grad = self._kept.get(parameter)
        if self._open and weight == 0:
            gradients = ((parameter, parameter.grad) for parameter in self._parameters)
            self._kept = {parameter: grad.clone() for parameter, grad in gradients if grad is not None}
        elif self._open and self._weight not in (0, weight):
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(self._weight / weight)
        else:
            self._kept = {}
        self._idle = weight == 0
        if not (self._idle and self._open):
            self._weight = weight

    @property
    def accumulating(self) -> bool:
        """Whether an accumulation window is open."""
        return self._open

    def accumulate(self) -> None:
        """The next backward does not synchronise."""
        self._open = True

    def synchronised(self) -> None:
        """The accumulation window is closed."""
        self._open = False

    def apply_by_itself(self) -> None:
        """From now on weigh every gradient before it is added up: for a worker without others, and without windows."""
        for parameter in self._parameters:
            parameter.register_hook(lambda gradient: gradient * self._weight)  # type: ignore[no-untyped-call]

    def apply_whole(self, gradients: torch.Tensor) -> None:
        """Weigh gradients in place, of one backward and nothing before it."""
        if self._idle:
            gradients.zero_()
        else:
            gradients.mul_(self._weight)

    def apply(self, bucket: GradBucket, scale: float = 1.0) -> None:
        """Weigh the gradients of a bucket in place, times `scale`."""
        buffer = bucket.buffer()
        if not self._idle:
            # The same operation as DDP's own division, so that equal sizes give the same bits.
            buffer.mul_(self._weight * scale)
            return
        buffer.zero_()
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if parameter in self._kept:
                gradient.copy_(self._kept[parameter]).mul_(self._weight * scale)
