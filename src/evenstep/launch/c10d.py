"""Names of torch.distributed that type checkers do not see, or that it has renamed; and its errors."""

import re
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import GradBucket as GradBucket  # type: ignore[attr-defined]
from torch.distributed import PrefixStore as PrefixStore  # type: ignore[attr-defined]
from torch.distributed import Store as Store  # type: ignore[attr-defined]
from torch.distributed import TCPStore as TCPStore  # type: ignore[attr-defined]

all_gather_single: Final[Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Final[Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_ALL_TO_ALL: Final[Any] = getattr(dist.ProcessGroup, "all_to_all_single", None) or dist.ProcessGroup.alltoall_base

work_of: Final[Any] = torch._C._distributed_c10d._create_work_from_future  # type: ignore[attr-defined]
"""The operation that ends with a future."""

_PLACE: Final = re.compile(r"^\[[^]]*\.cc:\d+\] ")
"""The source location with which Gloo's errors begin."""

_OF_GLOO: Final = re.compile(f"{_PLACE.pattern}|Application timeout caused pair closure$")
"""How they begin, and the only one without a location: that of a connection on which an earlier operation failed."""


# On hosts these two are called in every iteration, so they skip a dozen Python calls of torch.distributed.


def start_sum(tensor: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Like an asynchronous `all_reduce` of a tensor on the host."""
    return group.allreduce([torch.view_as_real(tensor) if tensor.is_complex() else tensor])


def start_exchange(
    received: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup, splits: Sequence[int] = ()
) -> dist.Work:
    """Like an asynchronous `all_to_all_single` of tensors on the host; `splits` are sent and received, if not equal."""
    return _ALL_TO_ALL(group, received, sent, [*splits], [*splits])  # type: ignore[no-any-return]


def completed(value: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Return a future that has this value already."""
    future: Any = torch._C.Future([])  # The base of `torch.futures.Future`, as C++ makes them.
    future.set_result(value)
    return future  # type: ignore[no-any-return]


def of_communication(error: Exception) -> bool:
    """True if the communication library raised this error."""
    return isinstance(error, dist.DistError) or _OF_GLOO.match(str(error)) is not None


def of_data_worker(error: BaseException) -> bool:
    """True if PyTorch raised it because a data worker has died, which it does wherever the main thread is then."""
    return isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker (pid")


def reason(error: Exception) -> str:
    """Return the first sentence of an error of the communication library, without its source location."""
    line = str(error).strip().split("\n")[0]
    return _PLACE.sub("", line).partition(". ")[0].rstrip(".")
