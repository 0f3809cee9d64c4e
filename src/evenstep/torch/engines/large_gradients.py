"""Weighs large gradients in the pass that brings them into DistributedDataParallel's buckets."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, final
from weakref import ref

import torch
from torch.nn.parallel import DistributedDataParallel

from evenstep.launch.c10d import GradBucket

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

MIN_ELEMENTS: Final = 2**18
"""Of a gradient for which one pass less takes off more than its hook adds, which is some 50 microseconds."""


@dataclass(slots=True)
class _Views:
    """The gradients in a bucket at this address: those of large parameters by `id`, and the stretches of the others."""

    address: int
    large: dict[int, torch.Tensor]
    others: list[torch.Tensor]


@final
class LargeGradients:
    """Hooks on large parameters, each of which writes the weighed gradient into its bucket.

    DistributedDataParallel copies every gradient into its bucket and divides it in the same pass, but with a
    communication hook it only copies, and to weigh the bucket there is a second pass. A gradient that is found in its
    bucket is not copied, so these hooks leave one pass again, with the same operation and the same bits.

    What a gradient was weighed by is noted by parameter. So it does not matter if it was written to a bucket that has
    been replaced since: it is copied once more. A parameter with a later hook of the script, which may change its
    gradient, is left to its bucket, and so are all parameters of a static graph, which may accumulate several times.

    Attributes:
        weight: What the gradients that follow are multiplied by; None leaves them to their buckets.

    Args:
        parameters: Whose gradients to weigh.
        replica: Sums the gradients, which are views of its buckets.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], replica: DistributedDataParallel) -> None:
        self._replica = ref(replica)
        self.weight: float | None = None
        self._views: dict[int, torch.Tensor] = {}
        self._buckets: dict[int, _Views] = {}
        self._weighed: dict[int, float] = {}
        self._sums = 0
        self._handles: dict[int, RemovableHandle] = {}
        for each in parameters:
            if type(each) is torch.nn.Parameter and each.numel() >= MIN_ELEMENTS and each.is_contiguous():
                arrived = partial(self._arrived, id(each))
                self._handles[id(each)] = each.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]

    def begin(self, weight: float | None) -> None:
        """The gradients of a backward follow, to be multiplied by this weight; None leaves them to their buckets."""
        replica = self._replica()
        self.weight = None if replica is None or replica.static_graph else weight
        self._weighed.clear()

    def _arrived(self, key: int, parameter: torch.Tensor) -> None:
        gradient, view = parameter.grad, self._views.get(key)
        if self.weight is None or view is None or gradient is None or gradient.requires_grad or gradient.is_sparse:
            return
        hooks = parameter._post_accumulate_grad_hooks
        if not hooks or next(reversed(hooks)) != self._handles[key].id:
            return
        torch.mul(gradient, self.weight, out=view)
        parameter.grad = view
        self._weighed[key] = self.weight

    def finish(self, bucket: GradBucket, buffer: torch.Tensor, weight: float) -> None:
        """Weigh the gradients of a bucket with this buffer that are not weighed, or were by another weight."""
        self._sums += not bucket.index()
        # After the first backward DDP orders its buckets again, and views would keep the first ones in memory.
        known = self._handles and self._sums > 1 and not buffer.is_sparse
        views = self._views_of(bucket, buffer.data_ptr()) if known else None
        if views is None or self._weighed.keys().isdisjoint(views.large):
            buffer.mul_(weight)
            return
        rest = views.others.copy()
        for key, view in views.large.items():
            before = self._weighed.pop(key, None)
            if before is None:
                rest.append(view)
            elif before != weight:
                view.mul_(weight / before)
        if rest:
            torch._foreach_mul_(rest, weight)

    def _views_of(self, bucket: GradBucket, address: int) -> _Views:
        index = bucket.index()
        known = self._buckets.get(index)
        if known is not None and known.address == address:
            return known
        if not index:
            self._buckets.clear()  # There may be fewer from now on.
        buffer, large, edges, end = bucket.buffer(), {}, [0], 0
        for each, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
            end += view.numel()
            if id(each) in self._handles:
                large[id(each)] = view
                edges += [end - view.numel(), end]
        pairs = zip(edges[::2], [*edges[1::2], len(buffer)], strict=True)
        others = [buffer[start:stop] for start, stop in pairs if start < stop]
        self._views.update(large)
        self._buckets[index] = _Views(address=address, large=large, others=others)
        return self._buckets[index]

    def close(self) -> None:
        """Remove the hooks, which autograd keeps alive."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
