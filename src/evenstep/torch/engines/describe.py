"""Describes a model and its optimizers to the servers."""

import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, cast

import torch

from evenstep.core.errors import ConfigError
from evenstep.protocol.layout import Layout, ParameterSpec
from evenstep.protocol.optimizer import OptimizerSpec, Option, Options, State, plain_option
from evenstep.tensors.messages import DTYPES
from evenstep.tensors.optimizers import OPTIMIZERS, optimizer_named

_HOW_IT_IS_COMPUTED: Final = frozenset({"foreach", "fused", "capturable", "differentiable"})


def layout_of(named: Iterable[tuple[str, torch.Tensor]], optimizers: Sequence[torch.optim.Optimizer]) -> Layout:
    """The parameters that the optimizers step and that require gradients, in the order of their names.

    Raises:
        ConfigError: One is in two groups, has no name, or is of a kind that a message cannot carry.
    """
    groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
    named = list(named)
    names = {id(parameter): name for name, parameter in named}
    stepped: dict[int, int] = {}
    for number, group in enumerate(groups):
        for parameter in group:
            if id(parameter) in stepped:
                raise ConfigError(f"parameter {names.get(id(parameter))!r} is in two groups: leave it in one")
            if parameter.requires_grad and id(parameter) not in names:
                raise ConfigError(
                    f"group {number} steps a parameter of shape {list(parameter.shape)} that is in no model: give"
                    " prepare the module that holds it too"
                )
            stepped[id(parameter)] = number
    trained = {
        id(parameter): _spec(name, parameter, stepped[id(parameter)])
        for name, parameter in reversed(named)  # Of a tied parameter's names the first counts.
        if parameter.requires_grad and id(parameter) in stepped
    }
    if not trained:
        raise ConfigError("the optimizers step no parameter that requires gradients: there is nothing to train")
    return Layout(parameters=tuple(reversed(trained.values())), groups=len(groups))


def _spec(name: str, parameter: torch.Tensor, group: int) -> ParameterSpec:
    if torch.nn.parameter.is_lazy(parameter):
        raise ConfigError(f"parameter {name!r} has no shape yet: run the model on one batch before prepare")
    dtype = str(parameter.dtype).removeprefix("torch.")
    if parameter.layout != torch.strided or dtype not in DTYPES:
        raise ConfigError(
            f"parameter {name!r} is {dtype}, {parameter.layout}: a server can train dense parameters of"
            f" {', '.join(DTYPES)}, so convert it or set its requires_grad to False"
        )
    return ParameterSpec(name=name, shape=tuple(parameter.shape), dtype=dtype, group=group)


def describe(optimizer: torch.optim.Optimizer, allowed: Collection[str] = ()) -> OptimizerSpec:
    """How a server can run this optimizer; `allowed` are the names beyond the table that the servers were given.

    Raises:
        ConfigError: They cannot.
    """
    kind = type(optimizer)
    names = [name for name in (*OPTIMIZERS, *allowed) if optimizer_named(name, allowed) is kind]
    if not names:
        raise ConfigError(
            f"a server cannot run {kind.__module__}:{kind.__qualname__}: use {', '.join(OPTIMIZERS)} of torch.optim,"
            " exactly, or allow another element-wise optimizer by that name on the server's command line"
        )
    known = [name for name in inspect.signature(kind).parameters if name not in _HOW_IT_IS_COMPUTED]
    groups = tuple(
        {name: _plain(name, group[name]) for name in known if group.get(name) is not None and name != "params"}
        for group in optimizer.param_groups
    )
    return OptimizerSpec(name=names[0], groups=groups)


def options_of(spec: OptimizerSpec, optimizer: torch.optim.Optimizer) -> tuple[Options, ...]:
    """The options as the optimizer has them now: a scheduler may have changed them.

    Raises:
        ConfigError: One of them is nothing that can be sent, or a group was added.
    """
    if len(optimizer.param_groups) != len(spec.groups):
        raise ConfigError("a param group was added after prepare: add all groups before it")
    return tuple(
        {name: _plain(name, group[name]) for name in known}
        for known, group in zip(spec.groups, optimizer.param_groups, strict=True)
    )


def state_by_name(
    optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str], state_dict: Mapping[str, object]
) -> dict[str, State]:
    """The states in a state dict of this optimizer, by the names of its parameters."""
    states = cast("Mapping[int, State]", state_dict["state"])
    return {
        names[parameter]: states[index]
        for index, parameter in enumerate(_parameters(optimizer))
        if parameter in names and states.get(index)
    }


def state_by_index(
    optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str], states: Mapping[str, State]
) -> dict[int, State]:
    """States by name as this optimizer's `state_dict()["state"]` has them; the inverse of `state_by_name`."""
    return {
        index: states[names[parameter]]
        for index, parameter in enumerate(_parameters(optimizer))
        if parameter in names and states.get(names[parameter])
    }


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _plain(name: str, value: object) -> Option:
    """An option as plain numbers; a learning rate may be a tensor."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value)
    return plain_option(name, value)
