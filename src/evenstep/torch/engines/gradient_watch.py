"""Finds gradients that DistributedDataParallel did not sum, without a report, and those that a script changed."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, final

import torch

from evenstep.core.errors import ConfigError

_MAX_NAMED: Final = 3


@final
class GradientWatch:
    """Tracks whether a model's gradients are sums over all workers.

    Backward reaches the first trained parameter last. If a gradient arrives there and the reduction of the last bucket
    does not follow, the gradients are this worker's alone.

    Attributes:
        local: That parameter, if a gradient arrived there since the last bucket was on its way to all workers.
        frozen: The parameters without gradients. With none, and nothing `local`, nothing need be checked.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self.frozen = {name: each for name, each in model.named_parameters() if not each.requires_grad}
        self.local: deque[torch.Tensor] = deque(maxlen=1)
        self.close: Callable[[], None] = lambda: None
        """Removes the hook."""
        if self._trained:
            first = next(iter(self._trained.values()))
            self.close = first.register_post_accumulate_grad_hook(self.local.append).remove  # type: ignore[no-untyped-call]

    def require_summed(self, optimizer: torch.optim.Optimizer, *, reduces: bool | None) -> None:
        """Check that all gradients of an optimizer are sums.

        `reduces`: whether the backward of the last forward pass will synchronise; None if it has.

        Raises:
            ConfigError: They are not; the message says why.
        """
        thawed = [name for name, each in self.frozen.items() if each.requires_grad and each.grad is not None]
        if not thawed and not self.local:
            return
        stepped = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        if any(self.frozen[name] in stepped for name in thawed):
            raise ConfigError(
                f"the gradient of {_named(thawed)} is not summed over the workers, since requires_grad was False in"
                " prepare: set it before, and freeze afterwards"
            )
        if not any(each in stepped and each.grad is not None for each in self._trained.values()):
            return
        if reduces is False:
            raise ConfigError(
                "the last backward before this step was inside no_sync, so each worker has its own gradient: leave"
                " no_sync for the last forward and backward of a step"
            )
        without = [name for name, each in self._trained.items() if each.grad is None]
        if reduces and without:
            raise ConfigError(
                f"{_named(without)} got no gradient, and DistributedDataParallel waits for one: freeze before prepare"
                " what is never used, or give prepare DistributedDataParallel(model, find_unused_parameters=True)"
            )
        raise ConfigError(
            "a backward was not summed over the workers: call the model that prepare returned (not its .module) once"
            " for each backward, add losses up that rest on one forward pass, and change a model's dtype before prepare"
        )


@final
class ChangeWatch:
    """Notices that a script changes gradients after a backward, by the version of one of them."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._watched = next(each for each in parameters if each.requires_grad)
        self._complete: int | None = None
        self.close = self._watched.register_post_accumulate_grad_hook(self._completed).remove  # type: ignore[no-untyped-call]

    def _completed(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self._complete = parameter.grad._version

    def changed(self) -> bool:
        """True if it was changed since the last backward that reached it; asked once for each backward."""
        complete, self._complete = self._complete, None
        gradient = self._watched.grad
        return gradient is not None and complete not in (None, gradient._version)


def _named(names: list[str]) -> str:
    more = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
