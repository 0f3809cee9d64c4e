"""The contents of a checkpoint besides its loader: models, optimizers, extras and random generators.

Tensors go to torch.distributed.checkpoint, which can shard and reshard them. The rest is small. It has an
empty tensor in the place of each tensor, and is read back as plain values only.
"""

import io
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self, cast, final

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful

from evenstep.core.errors import ConfigError
from evenstep.core.shown import first_line, shown
from evenstep.tensors.messages import all_finite
from evenstep.torch.model import device_of, unwrapped

_MODEL: Final = "model."  # The prefix of the paths of a model's tensors.


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The user's own models, the optimizers, and the extras."""

    models: tuple[torch.nn.Module, ...]
    optimizers: tuple[torch.optim.Optimizer, ...]
    extras: Mapping[str, Stateful]

    @classmethod
    def of(cls, model: Any, optimizer: Any, extras: Mapping[str, Stateful] | None) -> Self:
        """Take the arguments of `save` and `restore`; ConfigError if an extra has no state."""
        models = model if isinstance(model, tuple) else (model,)
        if not isinstance(extras, Mapping | None):
            raise ConfigError(f"extras must be a dict of names and objects, not {shown(extras)}")
        for name, each in (extras or {}).items():
            if not isinstance(each, Stateful):
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
        """True if this worker's weights, or its shards of them, hold no NaN and no infinity."""
        return all_finite(each for model in self.models for each in model.parameters())

    def state(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return the state of everything as plain values, and its tensors by path, such as `model.0.layer.weight`.

        All workers must call it together.

        Raises:
            ConfigError: Two tensors have the same path.
        """
        tensors: dict[str, torch.Tensor] = {}

        def take(path: str, tensor: torch.Tensor) -> torch.Tensor:
            if path in tensors:
                raise ConfigError(f"the state to be saved has two tensors at {path!r}: rename one of them")
            tensors[path] = tensor.detach()
            return torch.empty(0)

        state = {
            "model": [model.state_dict() for model in self.models],
            "optimizer": [_state_of(optimizer) for optimizer in self.optimizers],
            "extras": {name: each.state_dict() for name, each in self.extras.items()},
        }
        return {key: _with_tensors(take, key, node) for key, node in state.items()}, tensors

    def targets(self, plain: Any, metadata: Metadata) -> dict[str, torch.Tensor]:
        """Return the tensors to read a checkpoint's tensors into, by their paths.

        Models give their own tensors. An optimizer that has not stepped has none yet, so the others are new,
        and sharded like the parameter that they belong to, or like the current tensor.

        Raises:
            ConfigError: The checkpoint is of other models, optimizers or extras.
        """
        stored = {
            path: each
            for path, each in metadata.state_dict_metadata.items()
            if path.partition(".")[0] in plain and isinstance(each, TensorStorageMetadata)
        }
        present = self.state()[1]
        self._require_same(plain, present, stored)
        # The parameters by the path of their optimizer state, such as `optimizer.0.state.3`.
        owners = {
            f"optimizer.{index}.state.{number}": parameter
            for index, optimizer in enumerate(self.optimizers)
            for number, parameter in enumerate(each for group in optimizer.param_groups for each in group["params"])
        }
        targets = {}
        for path, each in stored.items():
            like = present.get(path, owners.get(".".join(path.split(".")[:4])))
            if path.startswith(_MODEL):
                targets[path] = present[path]
            elif like is not None and like.shape == each.size:
                targets[path] = torch.empty_like(like, dtype=each.properties.dtype, requires_grad=False)
            else:
                targets[path] = torch.empty(each.size, dtype=each.properties.dtype)
        return targets

    def load(self, plain: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Continue from the state that `plain` and the tensors form together."""
        state = {key: _with_tensors(lambda path, _: tensors[path], key, node) for key, node in plain.items()}
        for model, saved in zip(self.models, state["model"], strict=True):
            own = model.state_dict()  # It has the versions of the modules, which a plain dict lacks.
            own.update(saved)
            model.load_state_dict(own)
        for optimizer, saved in zip(self.optimizers, state["optimizer"], strict=True):
            _load_optimizer(optimizer, saved)
        for name, each in self.extras.items():
            each.load_state_dict(state["extras"][name])

    def _require_same(
        self, plain: Any, present: Mapping[str, torch.Tensor], stored: Mapping[str, TensorStorageMetadata]
    ) -> None:
        mine = {path: list(each.shape) for path, each in present.items() if path.startswith(_MODEL)}
        saved = {path: list(each.size) for path, each in stored.items() if path.startswith(_MODEL)}
        lacking, foreign = sorted(mine.keys() - saved.keys()), sorted(saved.keys() - mine.keys())
        others = [path for path, shape in mine.items() if saved.get(path) != shape]
        for path in (lacking or foreign or others)[:1]:
            name = repr(path.split(".", 2)[2])
            found = f"{name} is {saved.get(path)} there and {mine.get(path)} here"
            if lacking or foreign:
                found = f"it lacks {name}" if lacking else f"it has {name}, which this model lacks"
            raise ConfigError(f"the checkpoint is of another model ({found}): restore into the model it was taken of")
        groups = [[len(group["params"]) for group in each.param_groups] for each in self.optimizers]
        if groups != [[len(group["params"]) for group in each["param_groups"]] for each in plain["optimizer"]]:
            raise ConfigError(
                "the checkpoint's optimizer has other param groups than this one: restore into the optimizer that it"
                " was taken of"
            )
        names, wanted = sorted(plain["extras"]), sorted(self.extras)
        if names != wanted:
            raise ConfigError(f"the checkpoint has the extras {names}, and {wanted} are to be restored: give the same")


def _state_of(optimizer: Any) -> dict[str, Any]:
    """Return the whole state on every worker, even if the optimizer splits it (`ZeroRedundancyOptimizer`)."""
    consolidate = getattr(optimizer, "consolidate_state_dict", None)
    if not callable(consolidate):
        return cast("dict[str, Any]", optimizer.state_dict())
    whole: dict[str, Any] = {}
    for rank in range(dist.get_world_size(optimizer.process_group)):
        consolidate(to=rank)  # Only that rank has it, until the next one.
        if rank == dist.get_rank(optimizer.process_group):
            whole = optimizer.state_dict()
    return whole


def _load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load the state. Refuses another kind of optimizer's, which torch would accept and then fail on in a step."""
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


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of the random generators of Python, NumPy and torch, on the CPU and on the worker's device."""
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


def _with_tensors(visit: Callable[[str, torch.Tensor], torch.Tensor], path: str, node: Any) -> Any:
    """Return the tree of lists and dicts with `visit(path, tensor)` in the place of each tensor.

    Parts without tensors stay the same objects, such as the Counter of a scheduler.
    """
    if isinstance(node, torch.Tensor):
        return visit(path, node)
    if not isinstance(node, Mapping | list | tuple):
        return node
    members = dict(node) if isinstance(node, Mapping) else dict(enumerate(node))
    visited = {key: _with_tensors(visit, f"{path}.{key}", value) for key, value in members.items()}
    if all(visited[key] is value for key, value in members.items()):
        return node
    if isinstance(node, Mapping):
        return visited
    return list(visited.values()) if isinstance(node, list) else tuple(visited.values())


def packed(what: str, plain: Any) -> bytes:
    """Encode plain values as bytes.

    Raises:
        ConfigError: Another value is among them, which could not be read back without running code.
    """
    buffer = io.BytesIO()
    try:
        torch.save(plain, buffer)
        unpacked(buffer.getvalue())
    except Exception as error:  # pickle raises whatever the object raises.
        raise ConfigError(
            f"the state of {what} holds more than tensors and plain values, and is not saved"
            f" ({first_line(error).rstrip('.')}): have its state_dict return numbers, strings, tensors and lists or"
            " dicts of them"
        ) from error
    return buffer.getvalue()


def unpacked(content: bytes) -> Any:
    """Decode plain values from bytes, without running any code in them."""
    return torch.load(io.BytesIO(content), weights_only=True)
