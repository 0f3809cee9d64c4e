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

if TYPE_CHECKING:
    from collections.abc import Callable

    from evenstep.launch.c10d import GradBucket

_HOST: Final = torch.device("cpu")


@final
class SummingGroup(dist.ProcessGroup):
    """The process group of a reducer. No other part of torch.distributed knows it.

    Attributes:
        group: It communicates there.
        sum: It sums buckets of gradients instead, if it is set.
        bytes: The bytes of all gradients.
        parameters: The parameters of each bucket, by the bytes of the buckets before it, after a look.
    """

    @classmethod
    def for_reducer(cls, replica: DistributedDataParallel, group: dist.ProcessGroup | None) -> "SummingGroup | None":
        """Give the replica a new reducer of the parameters that are trained now, without a hook, and with such a group.

        It has the replica's own group, and None is returned, if `group` is None, or parameters are complex or have
        sparse gradients.
        """
        inside: Any = replica  # Its methods have no types.
        parameters, sparse = inside._build_params_for_reducer()
        names = inside._build_debug_param_to_name_mapping(parameters)
        own, made = inside.process_group, None
        if group is not None and not (any(sparse) or any(each.is_complex() for each in parameters)):
            made = inside.process_group = cls(group, replica, sum(each.nbytes for each in parameters))
        try:
            inside._ddp_init_helper(parameters, sparse, names, inside.static_graph)
        finally:
            inside.process_group = own
        if inside.static_graph:
            inside.static_graph = False  # Otherwise it would not tell the new reducer.
            inside._set_static_graph()
        inside._has_rebuilt_buckets = False
        return made

    def __init__(self, group: dist.ProcessGroup, replica: DistributedDataParallel, size: int) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self._register_backend(_HOST, dist.ProcessGroup.BackendType.GLOO, group._get_backend(_HOST))
        self.group, self._replica, self.bytes = group, ref(replica), size
        self.sum: Callable[[torch.Tensor], Any] | None = None
        self.parameters: dict[int, list[torch.Tensor]] = {}
        self._rebuilt: bool | None = None

    # In a function that is compiled with its backward, a compiler would look into these, and cannot.

    @torch._dynamo.decorators.skip
    def allreduce(self, tensors: list[torch.Tensor], *_: Any) -> dist.Work:
        """Sum a bucket of gradients, or the flags of used parameters, which are integers."""
        if self.sum is None or tensors[0].dtype is torch.int32:
            return self.group.allreduce(tensors)
        compiler = set_eval_frame(None)
        try:
            return self.sum(tensors[0])  # type: ignore[no-any-return]
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
            begins = accumulate((each.buffer().nbytes for each in buckets), initial=0)
            self.parameters = {begin: each.parameters() for begin, each in zip(begins, buckets, strict=False)}
