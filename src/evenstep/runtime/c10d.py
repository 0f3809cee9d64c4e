"""Names of torch.distributed that it exports at run time but hides from type checkers."""

from torch.distributed import GradBucket, PrefixStore, Store  # type: ignore[attr-defined]

__all__ = ["GradBucket", "PrefixStore", "Store"]
