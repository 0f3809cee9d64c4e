"""The optimizer and the schedulers of a run whose workers step once for several micro-batches."""

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch.optim.lr_scheduler import LRScheduler

from evenstep.core.errors import ConfigError
from evenstep.worker.iteration import Iteration


@final
class WindowedOptimizer(torch.optim.Optimizer):
    """The user's optimizer, which steps and forgets its gradients only where the last micro-batch is in hand.

    `step` does nothing before the last micro-batch of an iteration, and `zero_grad` nothing while gradients wait for
    that step, so an ordinary loop accumulates by itself. Everything else is the user's optimizer's own. `iteration`
    returns the iteration in hand.
    """

    # A GradScaler then hands over its factor instead of dividing the gradients itself, in every micro-batch.
    _step_supports_amp_scaling = True

    def __init__(self, optimizer: torch.optim.Optimizer, iteration: Callable[[], Iteration | None]) -> None:
        # Not Optimizer.__init__: this one has no parameters, state or hooks of its own.
        self._optimizer = optimizer
        self._iteration = iteration
        self._swallowed: int | None = None
        self._stepped: int | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "step":
            raise ConfigError(
                "a scheduler was built on the optimizer that prepare returned, and would count micro-batches: build it"
                " on your own optimizer before, and give it as prepare(..., schedulers=scheduler)"
            )
        if name == "grad_scale":
            raise ConfigError("a GradScaler does not go with micro_batch: use bfloat16, or leave out micro_batch")
        if name in ("_optimizer", "_iteration", "_swallowed", "_stepped"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._optimizer, name, value)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._optimizer!r})"

    def __getstate__(self) -> dict[str, Any]:
        """A copy is a copy of the user's optimizer, and waits for the same micro-batches."""
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, value)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step, where the last micro-batch is in hand.

        Raises:
            ConfigError: A closure was given.
        """
        if closure is not None:
            raise ConfigError("an optimizer that takes a closure does not go with micro_batch: leave out one of them")
        now = self._iteration()
        if now is not None and not now.piece.last:
            self._swallowed = now.number
            return None
        self._stepped = None if now is None else now.number
        return self._optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, unless they wait for more micro-batches."""
        if not self.accumulating:
            self._optimizer.zero_grad(set_to_none=set_to_none)

    @property
    def accumulating(self) -> bool:
        """Whether there are gradients that wait for more micro-batches and a step."""
        now = self._iteration()
        if now is None or now.number == self._stepped:
            return False
        return not now.piece.first or now.number == self._swallowed

    def state_dict(self) -> dict[str, Any]:
        """The user's optimizer's."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into the user's optimizer."""
        self._optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """To the user's optimizer."""
        self._optimizer.add_param_group(param_group)


def window_scheduler(scheduler: LRScheduler, closes: Callable[[], bool]) -> None:
    """Make the scheduler's `step` do nothing between two micro-batches."""
    step, state_dict = scheduler.step, scheduler.state_dict

    def step_where_due(*args: Any, **kwargs: Any) -> None:
        if closes():
            step(*args, **kwargs)

    def state_without_these() -> dict[str, Any]:
        # torch takes everything that hangs on a scheduler for its state.
        return {name: value for name, value in state_dict().items() if name not in ("step", "state_dict")}

    scheduler.step = step_where_due  # type: ignore[method-assign]
    scheduler.state_dict = state_without_these  # type: ignore[method-assign]


def require_schedulers_given(optimizers: Sequence[torch.optim.Optimizer], schedulers: Sequence[LRScheduler]) -> None:
    """Check that every optimizer with a scheduler has it among `schedulers`.

    Raises:
        ConfigError: One has not; its scheduler would count micro-batches, of which each worker has another number.
    """
    for optimizer in optimizers:
        # torch marks the step of an optimizer that a scheduler watches.
        watched = getattr(optimizer.step, "_wrapped_by_lr_sched", False)
        given = (getattr(scheduler, "optimizer", None) for scheduler in schedulers)
        if watched and not any(known is optimizer for known in given):
            raise ConfigError(
                "the optimizer has a learning-rate scheduler, which would count micro-batches: give it too, as"
                " prepare(..., schedulers=scheduler)"
            )
