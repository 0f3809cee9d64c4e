"""Models under torch.compile, for which every size of a batch may be a shape to compile for."""

from typing import Any

import torch
from torch.utils._pytree import tree_leaves


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether the model, or a part of it, is compiled: by `torch.compile(model)` or by `model.compile()`."""
    return any(
        isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None
        for module in model.modules()
    )


def mark_dynamic(inputs: Any, *, length: int) -> None:
    """Tell the compiler that the first axis of the tensors of a batch of this length will change.

    It would find out by itself, after it has compiled for the first size alone, unless it was told `dynamic=False`.
    """
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf) == length:
            torch._dynamo.maybe_mark_dynamic(leaf, 0)
