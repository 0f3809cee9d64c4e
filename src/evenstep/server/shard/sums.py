"""Arithmetic on messages: weighted sums of gradients, and weights that are moved along the momentum.

Sums are added in order. Half precision is added in float32 and rounded once.
"""

import math
from collections.abc import Sequence
from typing import Final, cast

import torch

from evenstep.protocol.layout import ShardLayout
from evenstep.protocol.optimizer import Options, State
from evenstep.tensors.messages import flat_views

_CHUNK_ELEMENTS: Final = 2**20


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums."""
    return dtype if dtype.itemsize >= torch.float32.itemsize else torch.float32


def add_up(parts: Sequence[tuple[torch.Tensor, float]], total: torch.Tensor) -> None:
    """Write the weighted sum of at least one part into `total`."""
    first, weight = parts[0]
    if first.dtype == total.dtype:
        torch.mul(first, weight, out=total)
    else:
        total.copy_(first).mul_(weight)
    for part, factor in parts[1:]:
        total.add_(part, alpha=factor)


@torch.no_grad()
def combined(layout: ShardLayout, messages: Sequence[tuple[torch.Tensor, float]]) -> torch.Tensor:
    """The weighted sum of at least one message, as a message."""
    whole = torch.empty(layout.nbytes, dtype=torch.uint8)
    parts = [(flat_views(layout, message), weight) for message, weight in messages]
    for block, total in enumerate(flat_views(layout, whole)):
        for start in range(0, total.numel(), _CHUNK_ELEMENTS):
            own = slice(start, start + _CHUNK_ELEMENTS)
            chunk = total[own]
            summed = chunk if wide(chunk.dtype) == chunk.dtype else torch.empty_like(chunk, dtype=wide(chunk.dtype))
            add_up([(flat[block][own], weight) for flat, weight in parts], summed)
            if summed is not chunk:
                chunk.copy_(summed)
    return whole


def moved_on(weights: torch.Tensor, state: State, options: Options, distance: float, *, out: torch.Tensor) -> None:
    """Write `weights` - `distance` * direction into `out`, without further memory.

    Args:
        weights: The weights of one chunk.
        state: Its optimizer state, as torch has it. If it holds no momentum, the weights are copied.
        options: The options of its group, as of the latest commit.
        distance: From `core.sync.rate.look_ahead`, which defines the direction.
        out: The result, of the same shape and dtype.
    """
    buffer, mean = state.get("momentum_buffer"), state.get("exp_avg")
    if distance and isinstance(buffer, torch.Tensor):
        torch.sub(weights, buffer, alpha=distance, out=out)
    elif distance and isinstance(mean, torch.Tensor) and "exp_avg_sq" in state and _steps(state) > 0:
        steps = _steps(state)
        of_mean, of_square = (1.0 - beta**steps for beta in cast("tuple[float, float]", options["betas"]))
        square = cast("torch.Tensor", state.get("max_exp_avg_sq", state["exp_avg_sq"]))
        torch.sqrt(square, out=out)
        out.mul_(1.0 / math.sqrt(of_square)).add_(cast("float", options["eps"]))
        torch.div(mean, out, out=out)
        out.mul_(-distance / of_mean).add_(weights)
    else:
        out.copy_(weights)


def _steps(state: State) -> float:
    return float(cast("torch.Tensor", state["step"]))
