"""Finds steps on gradients that nothing sums: of parameters that no prepared model has, or of other optimizers."""

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar, final
from weakref import WeakKeyDictionary, WeakSet, ref

import torch

from evenstep.core.errors import ConfigError
from evenstep.core.shown import shown
from evenstep.torch.engines.engine import Engine

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)


@final
class KnownParameters:
    """The parameters of the models at the time of `prepare`, the only ones whose gradients the workers sum."""

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        self._known = [parameter for model in models for parameter in model.parameters()]
        self._ids = frozenset(map(id, self._known))  # Unique, since the list keeps the parameters.

    def require(self, optimizer: torch.optim.Optimizer) -> None:
        """Check an optimizer before its step.

        Raises:
            ConfigError: It would step on a gradient that is this worker's own.
        """
        if all(self._ids.issuperset(map(id, group["params"])) for group in optimizer.param_groups):
            return
        given = (parameter for group in optimizer.param_groups for parameter in group["params"])
        stepped = [each for each in given if id(each) not in self._ids and each.grad is not None]
        if stepped:
            raise ConfigError(
                f"the optimizer steps on {len(stepped)} parameters that the model did not have when it was prepared,"
                f" such as one of shape {list(stepped[0].shape)}: their gradients are not summed over the workers, so"
                " make them part of the model before, also those of a loss, or prepare their model and"
                " optimizer too; evenstep.torch.leave_alone(optimizer) lets each worker train them on its own"
            )


_alone: Final[WeakSet[torch.optim.Optimizer]] = WeakSet()


def leave_alone(optimizer: Optimizer) -> Optimizer:
    """Let each worker train on its own with this optimizer, in a loop over a prepared loader; returns it.

    Without it, an optimizer that was not given to `prepare` is refused there when it steps on other parameters than the
    models': they would part from those of the other workers.

    Raises:
        ConfigError: It is not an optimizer of PyTorch.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"leave_alone takes an optimizer of PyTorch, not {shown(optimizer)}")
    _alone.add(optimizer)
    return optimizer


@final
class OtherOptimizers:
    """Checks the steps of optimizers that were not given to `prepare`, in loops over a prepared loader.

    Some are a batch's own, as for adversarial examples or inner loops. So one is refused when it comes again in a later
    iteration. PyTorch keeps its hook for the whole process, so that refers to this object weakly.
    """

    def __init__(self, engine: Engine, known: KnownParameters, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._engine = engine
        self._known = known
        self._given = frozenset(optimizers)
        self._seen: WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int]] = WeakKeyDictionary()

    def hook(self) -> Callable[..., None]:
        """What PyTorch calls before any optimizer of the process steps."""
        this = ref(self)

        def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            others = this()
            if others is not None and optimizer not in others._given:
                others.check(optimizer)

        return check

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Check the step of another optimizer.

        Raises:
            ConfigError: It would step on a gradient that is this worker's own.
        """
        now = self._engine.balancer.iteration
        if not self._engine.looping or now is None or optimizer in _alone:
            return
        self._engine.require_summed()
        place = now.number, len(self._engine.hand_outs.ahead)  # Without the prepared model no later iteration begins.
        if self._seen.setdefault(optimizer, place) != place:
            self._known.require(optimizer)


def check_step(
    engine: Engine, known: KnownParameters, optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]
) -> Any:
    """Check a step before any weight changes: after the closure's backward, if the step has one."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)

    def check() -> None:
        engine.before_step(optimizer)
        if engine.workers.count > 1:
            known.require(optimizer)

    if closure is None:
        check()
        return None

    def checked() -> Any:
        loss = closure()
        check()
        return loss

    return args[:1], {**kwargs, "closure": checked}
