"""The outer optimizers of local steps: momentum along the changes of models, at once or delayed."""

from collections.abc import Iterable
from typing import Any, Final, final

import torch

_ROUNDING: Final = 1e-9
"""How far a sum of shares may be from a whole number because each was rounded."""


def momentum_step(
    change: torch.Tensor, momentum: torch.Tensor, beta: float, *, new: torch.Tensor | None = None, nesterov: bool = True
) -> torch.Tensor:
    """Advance the momentum m in place by the `new` changes, which are this change d by default, and return the step.

        m <- beta m + new,   step = d + beta m, or m without Nesterov's look ahead

    With `new` = d this is the momentum of `torch.optim.SGD`. All tensors have the shape of a parameter.
    """
    momentum.mul_(beta).add_(change if new is None else new)
    return change.add(momentum, alpha=beta) if nesterov else momentum


@final
class DelayedNesterov(torch.optim.Optimizer):
    """Delayed Nesterov, for changes that arrive one by one: Liu et al., arXiv 2401.09135, Algorithm 3, with c = 0.

    With d a change, which stands for its part s of a global batch, and D the sum of those since the last momentum:

        D <- D + d
        each time that the s add up to 1:   m <- beta m + D,   w <- w - lr (d + beta m),   D <- 0
        otherwise:                          w <- w - lr d

    There the momentum comes with every N-th change, of which each is divided by N; here changes come in as parts
    already, and equal ones make it the same. The `share` of an update is s. With s = 1 it is Nesterov's method.
    """

    def __init__(self, params: Iterable[Any], lr: float, momentum: float, share: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "share": share})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step along the changes, which are in the place of gradients."""
        for group in self.param_groups:
            for weights in group["params"]:
                if (change := weights.grad) is None:
                    continue
                state = self.state[weights]
                if not state:
                    state["part"] = torch.zeros((), dtype=torch.float64)
                    state["momentum"], state["new"] = torch.zeros_like(weights), torch.zeros_like(weights)
                state["part"] += group["share"]
                state["new"] += change
                step = change
                if state["part"] > 1 - _ROUNDING:
                    state["part"] -= 1
                    step = momentum_step(change, state["momentum"], group["momentum"], new=state["new"])
                    state["new"].zero_()
                weights.sub_(step, alpha=group["lr"])
