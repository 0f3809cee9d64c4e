"""Arithmetic on messages: weighted sums of gradients, and weights that are moved along the momentum.

Sums are added in order. Half precision is added in float32 and rounded once.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeAlias, cast

import torch

from evenstep.protocol.layout import ShardLayout
from evenstep.protocol.optimizer import Options, State
from evenstep.tensors.messages import flat_views, norm_of, zeros

Parts: TypeAlias = Sequence[tuple[Sequence[torch.Tensor], float]]
"""Messages, each as one vector per block, and their weights; at least one."""

_PIECE_ELEMENTS: Final = 2**18
"""Sums are made in pieces that stay in the processor's cache. From 2^18 to 2^20 the time is the same."""


def pieces(layout: ShardLayout) -> Iterator[tuple[int, slice]]:
    """Yield the pieces of a message: the number of a block, and a part of it."""
    for number, block in enumerate(layout.blocks):
        for start in range(0, block.elements, _PIECE_ELEMENTS):
            yield number, slice(start, start + _PIECE_ELEMENTS)


def add_up(
    layout: ShardLayout,
    parts: Parts,
    into: Sequence[torch.Tensor],
    factors: Sequence[float] = (),
    correct: Callable[[torch.Tensor, int, slice], None] | None = None,
) -> None:
    """Write the weighted sum of messages, times the factor of each group, `into` a message, which may be the first.

    `correct` changes each piece of the sum in place, before it is rounded to the message's dtype.
    """
    for block, own in pieces(layout):
        total = into[block][own]
        factor = factors[layout.blocks[block].group] if factors else 1.0
        summed = total if _wide(total) == total.dtype else torch.empty_like(total, dtype=_wide(total))
        _weigh([(flats[block][own], weight * factor) for flats, weight in parts], summed)
        if correct is not None:
            correct(summed, block, own)
        if summed is not total:
            total.copy_(summed)


@torch.no_grad()
def combined(layout: ShardLayout, messages: Sequence[tuple[torch.Tensor, float]]) -> torch.Tensor:
    """Return the weighted sum of at least one message, as a message."""
    whole = zeros(layout.nbytes)
    add_up(layout, [(flat_views(layout, each), weight) for each, weight in messages], flat_views(layout, whole))
    return whole


def squared_norm(layout: ShardLayout, parts: Parts) -> float:
    """Return the squared norm of the weighted sum of messages.

    It is not finite if an element of the sum is not. Otherwise it overflows only if float64 does.
    """
    squares = 0.0
    for block, own in pieces(layout):
        piece, factor = parts[0][0][block][own], parts[0][1]
        if len(parts) > 1:
            piece, factor = torch.empty_like(piece, dtype=_wide(piece)), 1.0
            _weigh([(flats[block][own], weight) for flats, weight in parts], piece)
        norm = factor * norm_of(piece)
        squares += norm * norm
    return squares


def _weigh(parts: Sequence[tuple[torch.Tensor, float]], total: torch.Tensor) -> None:
    """Write the weighted sum of at least one part into `total`, which may be the first part."""
    first, weight = parts[0]
    if first.dtype != total.dtype:
        total.copy_(first).mul_(weight)
    elif weight != 1.0 or first.data_ptr() != total.data_ptr():
        torch.mul(first, weight, out=total)
    for part, factor in parts[1:]:
        total.add_(part, alpha=factor)


def _wide(part: torch.Tensor) -> torch.dtype:
    """Return the dtype of sums of such parts."""
    return part.dtype if part.dtype.itemsize >= torch.float32.itemsize else torch.float32


def moved_on(weights: torch.Tensor, state: State, options: Options, distance: float, *, out: torch.Tensor) -> None:
    """Write `weights` - `distance` * direction into `out`, without further memory.

    Args:
        weights: A parameter.
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
