"""Finds steps on unsummed gradients: of parameters outside the prepared models, or by other optimizers."""

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar, final
from weakref import WeakKeyDictionary, WeakSet, ref

import torch

from evenstep.core.errors import ConfigError
from evenstep.core.shown import shown
from evenstep.torch.engines.engine import Engine

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)

_alone: Final[WeakSet[torch.optim.Optimizer]] = WeakSet()


def leave_alone(optimizer: Optimizer) -> Optimizer:
    """Let each worker train on its own with this optimizer, in a loop over a prepared loader; returns it.

    Without it, an optimizer that was not given to `prepare` is refused there when it steps on parameters outside the
    models, which would diverge between workers.

    Raises:
        ConfigError: It is not a PyTorch optimizer.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"leave_alone takes an optimizer of PyTorch, not {shown(optimizer)}")
    _alone.add(optimizer)
    return optimizer


@final
class StepChecks:
    """Checks the steps of all optimizers of the process, before any weight changes.

    Only gradients of the models' parameters at the time of `prepare` are summed over the workers. Optimizers that were
    not given to `prepare` are checked in loops over a prepared loader. Some serve a single batch, as for adversarial
    examples or inner loops, so they are refused only when they step again in a later iteration.
    """

    def __init__(
        self, engine: Engine, models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        self._engine = engine
        self._known = [parameter for model in models for parameter in model.parameters()]
        self._ids = frozenset(map(id, self._known))  # Unique, since the list keeps the parameters alive.
        self._given = frozenset(map(ref, optimizers))
        self._seen: WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int]] = WeakKeyDictionary()

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        """The hook of an optimizer that was given to `prepare`; checks after the closure's backward, if there is one.

        Raises:
            ConfigError: It would step on a gradient that is this worker's own, or must not step now.
        """
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            engine = self._engine
            engine.before_step(optimizer)
            if engine.workers.count > 1:
                for group in optimizer.param_groups:
                    if not self._ids.issuperset(map(id, group["params"])):
                        self._require_known(optimizer)
            for origin in engine.origins:
                now = engine.hand_outs.latest_of(origin) if engine.hand_outs.ahead else origin.batch
                origin.stepped = 0 if now is None else now.iteration
            return None

        def checked() -> Any:
            loss = closure()
            self.before_step(optimizer, (), {})
            return loss

        return args[:1], {**kwargs, "closure": checked}

    def hook_of_others(self) -> Callable[..., None]:
        """The hook that PyTorch calls before any optimizer of the process steps, and keeps for the whole process."""
        this = ref(self)

        def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            checks = this()
            if checks is not None and ref(optimizer) not in checks._given:
                checks._check_other(optimizer)

        return check

    def _check_other(self, optimizer: torch.optim.Optimizer) -> None:
        now = self._engine.tracker.iteration
        if self._engine.looped is None or now is None or optimizer in _alone:
            return
        self._engine.require_summed()
        place = now.number, len(self._engine.hand_outs.ahead)  # Without the prepared model no later iteration begins.
        if self._seen.setdefault(optimizer, place) == place:
            return
        if self._engine.replaces_weights and any(id(each) in self._ids for each in _stepped(optimizer)):
            raise ConfigError(
                "the model is trained with an optimizer that was not given to prepare, and servers replace the weights"
                " that it changes: step the one that prepare returned, whose param_groups may change"
            )
        if self._engine.workers.count > 1:
            self._require_known(optimizer)

    def _require_known(self, optimizer: torch.optim.Optimizer) -> None:
        stepped = [each for each in _stepped(optimizer) if id(each) not in self._ids]
        if stepped:
            raise ConfigError(
                f"the optimizer steps on {len(stepped)} parameters that the model did not have when it was prepared,"
                f" such as one of shape {list(stepped[0].shape)}: their gradients are not summed over the workers, so"
                " make them part of the model before, also those of a loss, or prepare their model and"
                " optimizer too; evenstep.torch.leave_alone(optimizer) lets each worker train them on its own"
            )


def _stepped(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters that it would step on now."""
    return [each for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
