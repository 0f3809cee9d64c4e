"""What of a run is in a checkpoint beside its loader: models, optimizers, and whatever else the script names."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self, final

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from evenstep.checkpoint.tree import put_together, take_apart
from evenstep.core.errors import ConfigError
from evenstep.torch.model import PreparedModel, device_of


class Stateful(Protocol):
    """A scheduler, a GradScaler, an average of the weights: anything with a state."""

    def state_dict(self) -> Any:
        """Tensors and plain values, in lists and dicts."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Go on from there."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The user's own models, the optimizers, and what else has a state."""

    models: tuple[torch.nn.Module, ...]
    optimizers: tuple[torch.optim.Optimizer, ...]
    extras: Mapping[str, Stateful]

    @classmethod
    def of(cls, model: Any, optimizer: Any, extras: Mapping[str, Stateful] | None) -> Self:
        """Of the arguments of `save` and `restore`, either of which may be a tuple.

        Raises:
            ConfigError: Something is none of what it should be.
        """
        models = tuple(
            each.module if isinstance(each, PreparedModel) else each
            for each in (model if isinstance(model, tuple) else (model,))
        )
        optimizers = optimizer if isinstance(optimizer, tuple) else (optimizer,)
        for name, each in (extras or {}).items():
            if not (callable(getattr(each, "state_dict", None)) and callable(getattr(each, "load_state_dict", None))):
                raise ConfigError(f"the extra {name!r} has no state_dict and load_state_dict: leave it out")
        return cls(models=models, optimizers=optimizers, extras=extras or {})

    @property
    def device(self) -> torch.device:
        """Where the first model's parameters are."""
        return device_of(self.models[0])

    def state(self) -> dict[str, Any]:
        """Everything's state, tensors and all."""
        return {
            "model": [model.state_dict() for model in self.models],
            "optimizer": [optimizer.state_dict() for optimizer in self.optimizers],
            "extras": {name: each.state_dict() for name, each in self.extras.items()},
        }

    def targets(self, plain: Any, metadata: Metadata) -> dict[str, torch.Tensor]:
        """Where the tensors of a checkpoint are to be read to, by their paths.

        The models' are their own. An optimizer that has not stepped has none yet, so others are new, sharded as the
        parameter that they belong to, or as what is there now.

        Raises:
            ConfigError: The checkpoint is of other models, optimizers or extras.
        """
        self._require_same(plain)
        present = take_apart(self.state())[1]
        targets = {}
        for path in take_apart(plain)[1]:
            stored = metadata.state_dict_metadata[path]
            assert isinstance(stored, TensorStorageMetadata)
            size, dtype = stored.size, stored.properties.dtype
            like = present.get(path, self._parameter_of(path, plain))
            if path.startswith("model."):
                targets[path] = _require_size(path, present[path], size)
            elif like is not None and like.shape == size:
                targets[path] = torch.empty_like(like, dtype=dtype, requires_grad=False)
            else:
                targets[path] = torch.empty(size, dtype=dtype)
        return targets

    def load(self, plain: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        """Go on from the state that `plain` and the tensors are together."""
        state = put_together(plain, tensors)
        for model, saved in zip(self.models, state["model"], strict=True):
            own = model.state_dict()  # Which knows versions that a plain dict does not.
            own.update(saved)
            model.load_state_dict(own)
        for optimizer, saved in zip(self.optimizers, state["optimizer"], strict=True):
            _load_optimizer(optimizer, saved)
        for name, each in self.extras.items():
            each.load_state_dict(state["extras"][name])

    def _require_same(self, plain: Any) -> None:
        for what, mine in (("model", self.models), ("optimizer", self.optimizers)):
            if len(plain[what]) != len(mine):
                raise ConfigError(
                    f"the checkpoint has {len(plain[what])} {what}s, and {len(mine)} are to be restored: give the same"
                )
        saved, wanted = sorted(plain["extras"]), sorted(self.extras)
        if saved != wanted:
            raise ConfigError(f"the checkpoint has the extras {saved}, and {wanted} are to be restored: give the same")
        for model, entries in zip(self.models, plain["model"], strict=True):
            _require_same_keys(set(model.state_dict()), set(entries))
        for optimizer, entries in zip(self.optimizers, plain["optimizer"], strict=True):
            groups = [len(group["params"]) for group in optimizer.state_dict()["param_groups"]]
            if groups != [len(group["params"]) for group in entries["param_groups"]]:
                raise ConfigError(
                    "the checkpoint's optimizer has other param groups than this one: restore into the optimizer that"
                    " it was taken of"
                )

    def _parameter_of(self, path: str, plain: Any) -> torch.Tensor | None:
        """The parameter that a tensor of an optimizer's state belongs to, as `optimizer.0.state.3.exp_avg`."""
        parts = path.split(".")
        if parts[0] != "optimizer" or parts[2] != "state":
            return None
        groups = plain["optimizer"][int(parts[1])]["param_groups"]
        numbers = [number for group in groups for number in group["params"]]
        parameters = [each for group in self.optimizers[int(parts[1])].param_groups for each in group["params"]]
        return {str(number): each for number, each in zip(numbers, parameters, strict=True)}.get(parts[3])


def _require_same_keys(mine: set[str], saved: set[str]) -> None:
    if mine != saved:
        lacking, foreign = sorted(mine - saved), sorted(saved - mine)
        found = f"lacks {lacking[0]!r}" if lacking else f"has {foreign[0]!r}, which this model lacks"
        raise ConfigError(f"the checkpoint is of another model (it {found}): restore into the model it was taken of")


def _load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load its state; one of another kind would be taken, and fail in the first step."""
    known = [group.keys() & optimizer.defaults.keys() for group in optimizer.param_groups]
    try:
        optimizer.load_state_dict(saved)
        # What a newer torch has added got its default; the rest is lacking.
        lacking = sorted(
            name for names, group in zip(known, optimizer.param_groups, strict=True) for name in names - group.keys()
        )
    except KeyError as error:
        lacking = [str(error.args[0])]
    if lacking:
        raise ConfigError(
            f"the checkpoint is of another kind of optimizer than {type(optimizer).__name__} (it lacks"
            f" {lacking[0]!r}): restore into the one that it was taken of"
        )


def _require_size(path: str, tensor: torch.Tensor, size: torch.Size) -> torch.Tensor:
    if tensor.shape != size:
        raise ConfigError(
            f"the checkpoint is of another model ({path.split('.', 2)[2]!r} is {list(size)} there and"
            f" {list(tensor.shape)} here): restore into the model it was taken of"
        )
    return tensor
