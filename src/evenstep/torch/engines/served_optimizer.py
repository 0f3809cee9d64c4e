"""The optimizer of a run on parameter servers: its step pushes gradients and pulls weights."""

from collections.abc import Callable
from typing import Any, final

import torch

from evenstep.core.errors import ConfigError


@final
class ServedOptimizer(torch.optim.Optimizer):
    """The user's optimizer, whose update the servers compute: `step` sends them the gradients, and brings weights back.

    Learning rates and other options are the user's optimizer's own, and go with every push, so schedulers work. Its
    state (momentum, Adam's moments) is the servers'.

    Args:
        optimizer: The user's.
        push: Pushes and pulls.
        forget: Told when gradients are forgotten without a push.
        fetch: The state dict that the user's optimizer would have, as the servers have it.
        restore: Gives such a state to the servers.
    """

    # Fused optimizers take a loss scale into their step; the servers know of none, so a GradScaler has to divide by it.
    _step_supports_amp_scaling = False

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        push: Callable[[], None],
        forget: Callable[[], None],
        fetch: Callable[[], dict[str, Any]],
        restore: Callable[[dict[str, Any]], None],
    ) -> None:
        # Not Optimizer.__init__: this one has no parameters, state or hooks of its own.
        self._optimizer = optimizer
        self._push = push
        self._forget = forget
        self._fetch = fetch
        self._restore = restore

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # `step` too: a scheduler counts the steps of the optimizer that it was given.
        if name in ("_optimizer", "_push", "_forget", "_fetch", "_restore", "step"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._optimizer, name, value)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._optimizer!r})"

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Push the gradients and pull the weights.

        Raises:
            ConfigError: A closure was given.
            WorkerLostError: The servers are gone.
        """
        if closure is not None:
            raise ConfigError(
                "an optimizer that takes a closure does not go with parameter servers: use another scheme"
            )
        # A scheduler of the user's optimizer looks for this, and would warn that nothing was ever stepped.
        self._optimizer._opt_called = True  # type: ignore[attr-defined]
        self._push()
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        self._forget()
        self._optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """As the user's optimizer's, with the state that the servers have now."""
        return self._fetch()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into the user's optimizer and the servers; every worker may do it, and the last one counts."""
        self._restore(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not possible.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError("a param group cannot be added to an optimizer on servers: add all groups before prepare")
