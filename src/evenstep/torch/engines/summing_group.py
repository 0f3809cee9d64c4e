"""Sums the gradients of a DistributedDataParallel on hosts, with no pass of its own over them if all weigh alike.

Without a communication hook DDP divides gradients by the number of workers while it copies them into its buckets. With
one it only copies them, and the hook has to go over them once more. So its reducer gets a process group instead.
"""

from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, final
from weakref import ref

import torch
import torch.distributed as dist
from torch._C._dynamo.eval_frame import set_eval_frame
from torch.nn.parallel import DistributedDataParallel

from evenstep.launch.c10d import GradBucket, work_of

if TYPE_CHECKING:
    from collections.abc import Callable

_HOST: Final = torch.device("cpu")


@final
class SummingGroup(dist.ProcessGroup):
    """The process group of a reducer. No other part of torch.distributed knows it.

    Attributes:
        group: It communicates there.
        sum: It sums buckets of gradients instead, if it is set.
        elements: The elements of all gradients.
        parameters: The parameters of each bucket, by the elements of the buckets before it, after a look.
    """

    @classmethod
    def for_reducer(cls, replica: DistributedDataParallel, group: dist.ProcessGroup) -> "SummingGroup | None":
        """Give the replica a new reducer with such a group; None if a parameter has sparse gradients."""
        inside: Any = replica  # Its methods have no types.
        parameters, sparse = inside._build_params_for_reducer()
        if any(sparse):
            return None
        names = inside._build_debug_param_to_name_mapping(parameters)
        made = cls(group, replica, sum(each.numel() for each in parameters))
        own, inside.process_group = inside.process_group, made
        try:
            inside._ddp_init_helper(parameters, sparse, names, inside.static_graph)
        finally:
            inside.process_group = own
        if inside.static_graph:
            inside.static_graph = False  # Otherwise it would not tell the new reducer.
            inside._set_static_graph()
        return made

    def __init__(self, group: dist.ProcessGroup, replica: DistributedDataParallel, elements: int) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self._register_backend(_HOST, dist.ProcessGroup.BackendType.GLOO, group._get_backend(_HOST))
        self.group, self._replica, self.elements = group, ref(replica), elements
        self.sum: Callable[[SummingGroup, torch.Tensor], torch.futures.Future[torch.Tensor]] | None = None
        self.parameters: dict[int, list[torch.Tensor]] = {}
        self._rebuilt: bool | None = None

    # In a function that is compiled with its backward, a compiler would look into these, and cannot.

    @torch._dynamo.decorators.skip
    def allreduce(self, tensors: list[torch.Tensor], *_: Any) -> dist.Work:
        """Sum a bucket of gradients, or what else DDP sums, of integers."""
        if self.sum is None or not (tensors[0].is_floating_point() or tensors[0].is_complex()):
            return self.group.allreduce(tensors)
        compiler = set_eval_frame(None)
        try:
            return work_of(self.sum(self, tensors[0]))
        finally:
            set_eval_frame(compiler)

    @torch._dynamo.decorators.skip
    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> dist.Work:
        """Broadcast as the group does. PyTorch would call it with Python's lock, which the group's threads may need."""
        return self.group.broadcast(tensors, options)

    def look(self) -> None:
        """Note the parameters of each bucket, which the reducer does not tell in a backward. It copies all for it."""
        replica: Any = self._replica()
        if self._rebuilt is not replica._has_rebuilt_buckets:
            self._rebuilt = replica._has_rebuilt_buckets
            buckets: list[GradBucket] = replica.reducer._get_zeros_like_grad_buckets()
            begins = accumulate((each.buffer().numel() for each in buckets), initial=0)
            self.parameters = {begin: each.parameters() for begin, each in zip(begins, buckets, strict=False)}


@final
class DividedBucket:
    """Gradients that are divided by the number of workers already; otherwise like `dist.GradBucket`."""

    def __init__(self, group: SummingGroup, gradients: torch.Tensor, before: int) -> None:
        self._group, self._gradients, self._before = group, gradients, before

    def buffer(self) -> torch.Tensor:
        return self._gradients

    def is_last(self) -> bool:
        return self._before + self._gradients.numel() == self._group.elements

    def parameters(self) -> list[torch.Tensor]:
        """The parameters whose gradients they are, if the group has looked."""
        return self._group.parameters[self._before]

    def gradients(self) -> list[torch.Tensor]:
        """Views of the gradients, in the order of `parameters`."""
        parameters = self.parameters()
        parts = torch.split(self._gradients, [each.numel() for each in parameters])
        return [part.view_as(each) for part, each in zip(parts, parameters, strict=True)]
