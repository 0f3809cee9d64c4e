"""Names of torch.distributed that type checkers do not see, or that it has renamed; and its errors."""

import re
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch.distributed import GradBucket as GradBucket  # type: ignore[attr-defined]
from torch.distributed import PrefixStore as PrefixStore  # type: ignore[attr-defined]
from torch.distributed import Store as Store  # type: ignore[attr-defined]
from torch.distributed import TCPStore as TCPStore  # type: ignore[attr-defined]

all_gather_single: Final[Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Final[Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_ALL_TO_ALL: Final[Any] = getattr(dist.ProcessGroup, "all_to_all_single", None) or dist.ProcessGroup.alltoall_base

_PLACE: Final = re.compile(r"^\[[^]]*\.cc:\d+\] ")
"""The source location with which Gloo's errors begin."""


# On hosts these two are called in every iteration, and straight, without a dozen calls of Python in between.


def start_sum(tensor: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """As `all_reduce`, asynchronous, of a tensor on the host."""
    return group.allreduce([torch.view_as_real(tensor) if tensor.is_complex() else tensor])


def start_exchange(received: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """As `all_to_all_single`, asynchronous, of tensors on the host."""
    return cast("dist.Work", _ALL_TO_ALL(group, received, sent, [], []))


def completed(value: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """A future that has this value already."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(value)
    return future


def of_communication(error: Exception) -> bool:
    """Whether the communication library raised this error."""
    return isinstance(error, dist.DistError) or _PLACE.match(str(error)) is not None


def of_data_worker(error: BaseException) -> bool:
    """Whether PyTorch raised it since a data worker has died; it does so wherever the main thread is at that moment."""
    return isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker (pid")


def reason(error: Exception) -> str:
    """The first sentence of an error of the communication library, without its source location."""
    line = str(error).strip().split("\n")[0]
    return _PLACE.sub("", line).partition(". ")[0].rstrip(".")
