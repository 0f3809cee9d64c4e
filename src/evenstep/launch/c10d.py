"""Names of torch.distributed that it exports at run time but hides from type checkers, or that it has renamed."""

import re
from typing import Any, Final

import torch.distributed as dist
from torch.distributed import GradBucket, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

all_gather_single: Final[Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Final[Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_PLACE: Final = re.compile(r"^\[[^]]*\.cc:\d+\] ")
"""Where in its source an error of Gloo's was raised."""


def of_communication(error: Exception) -> bool:
    """Whether the communication library raised this error."""
    return isinstance(error, dist.DistError) or _PLACE.match(str(error)) is not None


def reason(error: Exception) -> str:
    """The first sentence of an error of the communication library, without its place in that library's source."""
    line = str(error).strip().split("\n")[0]
    return _PLACE.sub("", line).partition(". ")[0].rstrip(".")


__all__ = [
    "GradBucket",
    "PrefixStore",
    "Store",
    "TCPStore",
    "all_gather_single",
    "of_communication",
    "reason",
    "reduce_scatter_single",
]
