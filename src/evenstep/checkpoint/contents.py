"""What a checkpoint holds of a run besides its loader: models, optimizers, extras and random generators."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self, cast, final

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from evenstep.checkpoint.tree import put_together, take_apart
from evenstep.core.errors import ConfigError
from evenstep.core.shown import shown
from evenstep.tensors.messages import all_finite
from evenstep.torch.model import device_of, unwrapped


class Stateful(Protocol):
    """A scheduler, a GradScaler, an average of the weights: any object with a state."""

    def state_dict(self) -> Any:
        """Tensors and plain values, in lists and dicts."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Continue from this state."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The user's own models, the optimizers, and the extras."""

    models: tuple[torch.nn.Module, ...]
    optimizers: tuple[torch.optim.Optimizer, ...]
    extras: Mapping[str, Stateful]

    @classmethod
    def of(cls, model: Any, optimizer: Any, extras: Mapping[str, Stateful] | None) -> Self:
        """From the arguments of `save` and `restore`; ConfigError if an extra has no state."""
        models = model if isinstance(model, tuple) else (model,)
        if not isinstance(extras, Mapping | None):
            raise ConfigError(f"extras must be a dict of names and objects, not {shown(extras)}")
        for name, each in (extras or {}).items():
            if not (callable(getattr(each, "state_dict", None)) and callable(getattr(each, "load_state_dict", None))):
                raise ConfigError(f"the extra {name!r} has no state_dict and load_state_dict: leave it out")
        return cls(
            models=tuple(unwrapped(each) for each in models),
            optimizers=optimizer if isinstance(optimizer, tuple) else (optimizer,),
            extras=extras or {},
        )

    @property
    def device(self) -> torch.device:
        """The device of the first model's parameters."""
        return device_of(self.models[0])

    @property
    def finite(self) -> bool:
        """Whether this worker's weights, or its shards of them, hold no NaN and no infinity."""
        return all_finite(each for model in self.models for each in model.parameters())

    def state(self) -> dict[str, Any]:
        """The state of everything, tensors included; all workers must call it together."""
        return {
            "model": [model.state_dict() for model in self.models],
            "optimizer": [_state_of(optimizer) for optimizer in self.optimizers],
            "extras": {name: each.state_dict() for name, each in self.extras.items()},
        }

    def targets(self, plain: Any, metadata: Metadata) -> dict[str, torch.Tensor]:
        """The tensors to read a checkpoint's tensors into, by their paths.

        Those of the models are the models' own. An optimizer that has not stepped has none yet, so the others are new,
        and sharded as the parameter that they belong to, or as the present tensor.

        Raises:
            ConfigError: The checkpoint is of other models, optimizers or extras.
        """
        self._require_same(plain)
        present = take_apart(self.state())[1]
        owners = self._owners(plain)
        targets = {}
        for path in take_apart(plain)[1]:
            stored = metadata.state_dict_metadata[path]
            assert isinstance(stored, TensorStorageMetadata)
            size, dtype = stored.size, stored.properties.dtype
            like = present.get(path, owners.get(".".join(path.split(".")[:4])))
            if path.startswith("model."):
                targets[path] = _require_size(path, present[path], size)
            elif like is not None and like.shape == size:
                targets[path] = torch.empty_like(like, dtype=dtype, requires_grad=False)
            else:
                targets[path] = torch.empty(size, dtype=dtype)
        return targets

    def load(self, plain: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        """Continue from the state that `plain` and the tensors form together."""
        state = put_together(plain, tensors)
        for model, saved in zip(self.models, state["model"], strict=True):
            own = model.state_dict()  # It has the versions of the modules, which a plain dict lacks.
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
            groups = [len(group["params"]) for group in optimizer.param_groups]
            if groups != [len(group["params"]) for group in entries["param_groups"]]:
                raise ConfigError(
                    "the checkpoint's optimizer has other param groups than this one: restore into the optimizer that"
                    " it was taken of"
                )

    def _owners(self, plain: Any) -> dict[str, torch.Tensor]:
        """The parameters by the path of their optimizer state, such as `optimizer.0.state.3`."""
        return {
            f"optimizer.{index}.state.{number}": parameter
            for index, (optimizer, saved) in enumerate(zip(self.optimizers, plain["optimizer"], strict=True))
            for group, entries in zip(optimizer.param_groups, saved["param_groups"], strict=True)
            for number, parameter in zip(entries["params"], group["params"], strict=True)
        }


def _require_same_keys(mine: set[str], saved: set[str]) -> None:
    if mine != saved:
        lacking, foreign = sorted(mine - saved), sorted(saved - mine)
        found = f"lacks {lacking[0]!r}" if lacking else f"has {foreign[0]!r}, which this model lacks"
        raise ConfigError(f"the checkpoint is of another model (it {found}): restore into the model it was taken of")


def _state_of(optimizer: Any) -> dict[str, Any]:
    """The whole state, on every worker, also of an optimizer that cuts it over them (`ZeroRedundancyOptimizer`)."""
    consolidate = getattr(optimizer, "consolidate_state_dict", None)
    if not callable(consolidate):
        return cast("dict[str, Any]", optimizer.state_dict())
    whole: dict[str, Any] = {}
    for rank in range(dist.get_world_size(optimizer.process_group)):
        consolidate(to=rank)  # Only that one has it, until the next.
        if rank == dist.get_rank(optimizer.process_group):
            whole = optimizer.state_dict()
    return whole


def _load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load the state, and refuse one of another kind of optimizer, which torch would take and fail on in a step."""
    known = [group.keys() & optimizer.defaults.keys() for group in optimizer.param_groups]
    try:
        optimizer.load_state_dict(saved)
        # An option that a newer torch has added gets its default; any other must be in the state.
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


def random_state(device: torch.device) -> dict[str, Any]:
    """The state of the random generators of Python, NumPy and torch, on the CPU and on the worker's device."""
    _, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [np.asarray(keys).tolist(), *rest],
        "cpu": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Continue from a state of `random_state`."""
    random.setstate(state["python"])
    keys, *rest = state["numpy"]
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["cpu"])
    if state["device"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["device"], device)
