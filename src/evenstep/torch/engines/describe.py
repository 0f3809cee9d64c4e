"""Describes a model and its optimizer to the servers, which keep the optimizer's state."""

import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, cast, final

import msgspec
import torch

from evenstep.core.errors import ConfigError
from evenstep.protocol.layout import Layout, ParameterSpec, ShardLayout
from evenstep.protocol.optimizer import OptimizerSpec, Option, Options, State, plain_option
from evenstep.server.shard.independent import require_independent
from evenstep.tensors.messages import DTYPES
from evenstep.tensors.optimizers import OPTIMIZERS, optimizer_named
from evenstep.tensors.states import by_shard, decode_states, encode_states
from evenstep.transport.codec import DEFAULT_LIMITS
from evenstep.worker.servers.link import ServerLink

_MAX_OPTIONS_BYTES: Final = DEFAULT_LIMITS.header_bytes - 2**13  # A header has other fields, too.
_HOW_IT_IS_COMPUTED: Final = frozenset({"foreach", "fused", "capturable", "differentiable"})
_OF_SCHEDULERS: Final = frozenset(
    {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr", "param_names"}
)
"""Entries that schedulers and torch make in param groups, and that no optimizer reads."""


def layout_of(named: Iterable[tuple[str, torch.Tensor]], optimizers: Sequence[torch.optim.Optimizer]) -> Layout:
    """The parameters that the optimizers step and that require gradients, in the order of their names.

    Raises:
        ConfigError: A parameter is in two groups, has no name, or is of a kind that a message cannot carry.
    """
    named = list(named)
    names = {id(parameter): name for name, parameter in named}
    groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
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
        for name, parameter in reversed(named)  # A tied parameter is known by its first name.
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
    """Describe the optimizer for servers; `allowed` are the names beyond the table that the servers were given.

    Raises:
        ConfigError: A server cannot run it.
    """
    kind = type(optimizer)
    names = [name for name in (*OPTIMIZERS, *allowed) if optimizer_named(name, allowed) is kind]
    if not names:
        raise ConfigError(
            f"a server cannot run {kind.__module__}:{kind.__qualname__}: use {', '.join(OPTIMIZERS)} of torch.optim,"
            " exactly, or name another class in the scheme, as ssp:optimizer=my_module:MyClass"
        )
    known = [name for name in inspect.signature(kind).parameters if name not in _HOW_IT_IS_COMPUTED]
    groups = tuple(
        {name: _plain(name, group[name]) for name in known if group.get(name) is not None and name != "params"}
        for group in optimizer.param_groups
    )
    spec = OptimizerSpec(name=names[0], groups=groups)
    if names[0] not in OPTIMIZERS:
        _require_all_described(optimizer, known)
        numbered = ((each, number) for number, group in enumerate(optimizer.param_groups) for each in group["params"])
        require_independent(
            spec, allowed, [(tuple(each.shape), group) for each, group in numbered if each.requires_grad]
        )
    return spec


def _require_all_described(optimizer: torch.optim.Optimizer, known: Collection[str]) -> None:
    """Check that the param groups hold all constructor arguments, since servers construct the optimizer from them.

    Raises:
        ConfigError: They lack an argument, or hold one that the constructor does not take.
    """
    kind, default = type(optimizer), inspect.signature(type(optimizer)).parameters
    for group in optimizer.param_groups:
        given = set(group) - _HOW_IT_IS_COMPUTED - _OF_SCHEDULERS
        unsaid = {name for name in given & {*known} if group[name] is None and default[name].default is not None}
        for name in sorted(({"params", *known} ^ given) | unsaid):
            raise ConfigError(
                f"servers cannot run {kind.__module__}:{kind.__qualname__}: its option {name!r} is not both an argument"
                " of its constructor and in its param groups; give all arguments as defaults to torch.optim.Optimizer"
            )


def options_of(spec: OptimizerSpec, optimizer: torch.optim.Optimizer) -> tuple[Options, ...]:
    """The current options of the optimizer; a scheduler may have changed them.

    Raises:
        ConfigError: An option cannot be sent, or a group was added.
    """
    if len(optimizer.param_groups) != len(spec.groups):
        raise ConfigError("a param group was added after prepare: add all groups before it")
    return tuple(
        {name: _plain(name, group[name]) for name in known}
        for known, group in zip(spec.groups, optimizer.param_groups, strict=True)
    )


def require_small_options(spec: OptimizerSpec, optimizer: torch.optim.Optimizer) -> None:
    """Check that the options fit into the header of a push.

    Raises:
        ConfigError: They do not.
    """
    options = options_of(spec, optimizer)
    needed = len(msgspec.msgpack.encode(options))
    if needed > _MAX_OPTIONS_BYTES:
        raise ConfigError(
            f"the options of {len(options)} param groups take {needed} bytes, and at most {_MAX_OPTIONS_BYTES} can"
            " travel with a push to parameter servers: put parameters with the same options into one group"
        )


@final
class OptimizerState:
    """The user's optimizer, whose options go with every push and whose state the servers keep."""

    def __init__(
        self,
        link: ServerLink,
        optimizer: torch.optim.Optimizer,
        spec: OptimizerSpec,
        parameters: dict[str, torch.nn.Parameter],
        layouts: Sequence[ShardLayout],
    ) -> None:
        self._link = link
        self._spec = spec
        self._optimizer = optimizer
        self._names: dict[torch.Tensor, str] = {parameter: name for name, parameter in parameters.items()}
        self._shards = [[each.name for each in layout.parameters] for layout in layouts]

    def options(self) -> tuple[Options, ...]:
        """The current options of each param group; a scheduler may have changed them.

        Raises:
            ConfigError: An option cannot be sent, or a group was added.
        """
        return options_of(self._spec, self._optimizer)

    def fetch(self) -> dict[str, Any]:
        """The state dict of the user's optimizer, with the servers' state."""
        states: dict[str, dict[str, object]] = {}
        for encoded in self._link.fetch_states():
            states |= decode_states(encoded)
        return {**self._optimizer.state_dict(), "state": state_by_index(self._optimizer, self._names, states)}

    def hand_over(self) -> None:
        """Send the user's optimizer's state, if it has any, to the servers."""
        state_dict = self._optimizer.state_dict()
        if state_dict["state"]:
            states = state_by_name(self._optimizer, self._names, state_dict)
            self._link.load_states([encode_states(own) for own in by_shard(states, self._shards)])

    def clear(self) -> None:
        """Drop the state here, since the servers have it."""
        self._optimizer.state.clear()


def state_by_name(
    optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str], state_dict: Mapping[str, object]
) -> dict[str, State]:
    """The states in a state dict of this optimizer, by parameter name."""
    states = cast("Mapping[int, State]", state_dict["state"])
    return {name: states[index] for index, name in _named(optimizer, names) if states.get(index)}


def state_by_index(
    optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str], states: Mapping[str, State]
) -> dict[int, State]:
    """States by name in the form of this optimizer's `state_dict()["state"]`; the inverse of `state_by_name`."""
    return {index: states[name] for index, name in _named(optimizer, names) if states.get(name)}


def _named(optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> Iterator[tuple[int, str]]:
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return ((index, names[parameter]) for index, parameter in enumerate(parameters) if parameter in names)


def _plain(name: str, value: object) -> Option:
    """An option as plain numbers; a learning rate may be a tensor."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value)
    return plain_option(name, value)
