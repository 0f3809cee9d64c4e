"""Wrappers of the user's optimizers, for micro-batches or parameter servers, and of schedulers."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
from torch.optim.lr_scheduler import LRScheduler

from evenstep.core.errors import ConfigError
from evenstep.core.samples import Window
from evenstep.worker.hand_outs import HandedOut

if TYPE_CHECKING:
    from evenstep.torch.engines.served import ServedEngine


class _WrappedOptimizer(torch.optim.Optimizer):
    """Has the attributes of the user's optimizer, such as options and groups, except those named in `_OWN`."""

    _OWN: ClassVar[frozenset[str]]
    _optimizer: torch.optim.Optimizer

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        # Not Optimizer.__init__: this object has no parameters, state or hooks.
        object.__setattr__(self, "_optimizer", optimizer)

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._optimizer, name, value)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._optimizer!r})"

    def state_dict(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._optimizer.add_param_group(param_group)


def is_initialised(optimizer: object) -> bool:
    """True if its class called the `__init__` of `torch.optim.Optimizer`, without which it takes no hooks."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks")


@final
class WindowedOptimizer(_WrappedOptimizer):
    """The user's optimizer, stepping and clearing gradients only at the last micro-batch of an iteration.

    `step` does nothing before the last micro-batch, and `zero_grad` nothing while gradients wait for that step, so an
    ordinary loop accumulates gradients.
    """

    _OWN = frozenset({"_current", "_window", "_schedulers"})

    _current: Callable[[], HandedOut | None] = staticmethod(lambda: None)
    _window: Window
    _schedulers: Sequence[LRScheduler]

    def bind(self, current: Callable[[], HandedOut | None], window: Window, schedulers: Sequence[LRScheduler]) -> None:
        """Wait for the last micro-batch of an iteration from now on."""
        self._current, self._window, self._schedulers = current, window, schedulers

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # Between steps a GradScaler then hands over its factor, which is refused, instead of unscaling the gradients.
        return (now := self._current()) is not None and not now.piece.last

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "step":
            raise ConfigError(
                "a scheduler was built on the optimizer that prepare returned, and would count micro-batches: build it"
                " on your own optimizer before, and give it as prepare(..., schedulers=scheduler)"
            )
        if name == "grad_scale":
            raise ConfigError(
                "a GradScaler would change its scale with each batch that accumulates: call its step, unscale_ and"
                " update under `if loader.synchronises:`"
            )
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        """Copy the user's optimizer too; the copy waits for the same micro-batches."""
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, value)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Run the closure, if there is one, and step if the last micro-batch is the current one."""
        loss = _closed(closure)
        now = self._current()
        if now is None or self._window.steps(now.piece):
            self._optimizer.step()
        else:
            require_scheduler_given(self._optimizer, self._schedulers)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, unless they wait for more micro-batches."""
        if (now := self._current()) is None or not now.accumulates:
            self._optimizer.zero_grad(set_to_none=set_to_none)


@final
class ServedOptimizer(_WrappedOptimizer):
    """The user's optimizer, whose update the servers compute: `step` pushes the gradients and pulls the weights.

    Learning rates and other options stay in the user's optimizer and go with every push, so schedulers work. Its state
    (momentum, Adam's moments) is on the servers.
    """

    # To count steps, a scheduler replaces `step` of the optimizer that it was given.
    _OWN = frozenset({"_bound", "step"})
    # Fused optimizers take a loss scale into their step, which servers cannot: a GradScaler has to unscale gradients.
    _step_supports_amp_scaling = False

    _bound: "ServedEngine | None" = None

    def bind(self, engine: "ServedEngine") -> None:
        """Push to the servers of this engine from now on."""
        self._bound = engine

    @property
    def _engine(self) -> "ServedEngine":
        if self._bound is None:
            raise ConfigError("an optimizer on servers cannot be used before the first batch of the prepared loader")
        return self._bound

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Run the closure, if there is one, push the gradients and pull the weights.

        Raises:
            WorkerLostError: The servers are gone.
        """
        loss = _closed(closure)
        # A scheduler of the user's optimizer checks this, and would otherwise warn that nothing was stepped.
        self._optimizer._opt_called = True  # type: ignore[attr-defined]
        self._engine.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        if self._bound is not None:
            self._bound.forget_gradients()
        self._optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The state dict of the user's optimizer, with the servers' current state."""
        return self._engine.fetch_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load into the user's optimizer and the servers; every worker may do so, and the last one counts."""
        self._engine.restore_state(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: servers know the groups from the start.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError("a param group cannot be added to an optimizer on servers: add all groups before prepare")


def _closed(closure: Callable[[], float] | None) -> float | None:
    """The closure's loss; the optimizers that servers run call it once, before its step."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def window_scheduler(scheduler: LRScheduler, closes: Callable[[], bool]) -> None:
    """Make the scheduler's `step` do nothing between two micro-batches."""
    step, state_dict = scheduler.step, scheduler.state_dict

    def step_if_due(*args: Any, **kwargs: Any) -> None:
        if closes():
            step(*args, **kwargs)

    def state_without_these() -> dict[str, Any]:
        # torch puts every attribute of a scheduler into its state.
        return {name: value for name, value in state_dict().items() if name not in ("step", "state_dict")}

    scheduler.step = step_if_due  # type: ignore[method-assign]
    scheduler.state_dict = state_without_these  # type: ignore[method-assign]


def require_scheduler_given(optimizer: torch.optim.Optimizer, schedulers: Sequence[LRScheduler]) -> None:
    """Check that the optimizer's scheduler, if it has one, is among `schedulers`; only if steps do nothing in between.

    Raises:
        ConfigError: It is missing. It would count micro-batches, whose number differs from worker to worker.
    """
    # torch marks the step of an optimizer that has a scheduler.
    watched = getattr(optimizer.step, "_wrapped_by_lr_sched", False)
    if watched and not any(getattr(each, "optimizer", None) is optimizer for each in schedulers):
        raise ConfigError(
            "the optimizer has a learning-rate scheduler, which would count micro-batches: give it too, as"
            " prepare(..., schedulers=scheduler)"
        )
