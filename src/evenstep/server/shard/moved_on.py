"""Weights moved on along an optimizer's momentum."""

import math
from typing import cast

import torch

from evenstep.protocol.optimizer import Options, State


def moved_on(weights: torch.Tensor, state: State, options: Options, distance: float, *, out: torch.Tensor) -> None:
    """Write `weights` - `distance` * direction into `out`, of the same shape and dtype; nothing else is allocated.

    Args:
        weights: Of one chunk.
        state: Its optimizer state, as torch has it. Without a momentum in it the weights stay where they are.
        options: Its group's, as of the latest commit.
        distance: Of `core.sync.rate.look_ahead`, which says what the direction is.
        out: The result.
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
