"""Names of torch.distributed that it exports at run time but hides from type checkers, or that it has renamed."""

from typing import Any, Final

import torch.distributed as dist
from torch.distributed import GradBucket, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

all_gather_single: Final[Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Final[Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
gloo_backend: Final[Any] = getattr(dist, "ProcessGroupGloo", None)

__all__ = [
    "GradBucket",
    "PrefixStore",
    "Store",
    "TCPStore",
    "all_gather_single",
    "gloo_backend",
    "reduce_scatter_single",
]
