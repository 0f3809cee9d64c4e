"""The element-wise optimizers that a server runs, by name: described on a worker, built on the server.

No code comes from a peer: a name outside the table must stand on the server's own command line.
"""

import importlib
import inspect
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Self, TypeAlias, cast, final

import torch

from evenstep.core.errors import ConfigError

Option: TypeAlias = bool | float | tuple[float, ...]
Options: TypeAlias = Mapping[str, Option]
"""What an update depends on beside weights, gradient and state: lr, betas, ..."""

State: TypeAlias = Mapping[str, object]
"""A parameter's optimizer state, as in torch's `state_dict()["state"]`: tensors of its shape, and scalars."""

OPTIMIZERS: Final = MappingProxyType(
    {
        cls.__name__: cls
        for cls in (
            torch.optim.SGD,
            torch.optim.Adam,
            torch.optim.AdamW,
            torch.optim.Adagrad,
            torch.optim.RMSprop,
        )
    }
)
"""What every server can run."""

_HOW_IT_IS_COMPUTED: Final = frozenset({"foreach", "fused", "capturable", "differentiable"})
_SHAPES_THE_STATE: Final = frozenset({"amsgrad", "centered"})
_ONE_PASS: Final = frozenset({torch.float32, torch.float64})
_MOST_GROUPS: Final = 100_000
_MOST_OPTIONS: Final = 32
_MOST_NUMBERS: Final = 8
_LARGEST: Final = 60_000.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """An optimizer's name and the options of each of its param groups."""

    name: str
    groups: tuple[Options, ...]

    def options(self, optimizer: torch.optim.Optimizer) -> tuple[Options, ...]:
        """The options as the optimizer has them now: a scheduler may have changed them.

        Raises:
            ConfigError: One of them is nothing that can be sent, or a group was added.
        """
        if len(optimizer.param_groups) != len(self.groups):
            raise ConfigError("a param group was added after prepare: add all groups before it")
        return tuple(
            {name: _plain(name, group[name]) for name in known}
            for known, group in zip(self.groups, optimizer.param_groups, strict=True)
        )

    def to_record(self) -> dict[str, object]:
        """Plain values for the wire and for snapshots."""
        return {"name": self.name, "groups": options_to_record(self.groups)}

    @classmethod
    def from_record(cls, record: object) -> Self:
        """What `to_record` gave, from a peer that may send anything.

        Raises:
            ConfigError: It is nothing of the kind.
        """
        fields = cast("Mapping[object, object]", record) if isinstance(record, Mapping) else {}
        name = fields.get("name")
        if not isinstance(name, str):
            raise ConfigError("an optimizer is sent by name: send one")
        return cls(name=name, groups=options_from_record(fields.get("groups")))


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ParameterState:
    """A parameter's state, by kind: tensors of the parameter's shape, and numbers such as `step`."""

    elementwise: Mapping[str, torch.Tensor]
    scalars: Mapping[str, torch.Tensor | float]

    def alike(self) -> tuple[object, ...]:
        """What elements must have in common to be one chunk of an optimizer."""
        return *sorted(self.elementwise), *sorted((key, float(value)) for key, value in self.scalars.items())


@final
class Update:
    """The update rule that a spec stands for, on the server. `allowed` are names "module.path:Class" beyond the table.

    Raises:
        ConfigError: The name is not allowed, or the optimizer does not take the options.
    """

    __slots__ = ("_kind", "_one_pass", "_state_kinds", "spec")

    def __init__(self, spec: OptimizerSpec, allowed: Collection[str] = ()) -> None:
        self.spec = spec
        self._kind = _resolved(spec.name, allowed)
        self._one_pass = spec.name in OPTIMIZERS and "fused" in inspect.signature(self._kind).parameters
        self._state_kinds = [self._tried(options) for options in spec.groups]

    def build(self, parameters: Sequence[Sequence[torch.Tensor]]) -> torch.optim.Optimizer:
        """A new optimizer of these parameters, one sequence for each group of the spec; some may be empty.

        float32 and float64 take torch's fused form where there is one: the same arithmetic in a single pass, without
        temporaries. (With several threads torch wakes all of them for the smallest tensor: run a server with one.)
        Half-precision weights take torch's plain loop, as on a worker's CPU: the update is
        computed in their own dtype, every operation rounded to it.
        """
        groups: list[dict[str, object]] = [
            {**options, **self._computed({parameter.dtype for parameter in group}), "params": list(group)}
            for options, group in zip(self.spec.groups, parameters, strict=True)
        ]
        # Once more as defaults: Adagrad reads its initial accumulator value nowhere else.
        return _constructed(self._kind, groups, self.spec.groups[0])

    def check(self, options: Sequence[Options]) -> None:
        """Whether these options, one mapping per group, can be set from one commit to the next.

        Raises:
            ConfigError: One is unknown, of the wrong kind or out of range, or would need another state.
        """
        if len(options) != len(self.spec.groups):
            raise ConfigError(f"options came for {len(options)} groups: send those of all {len(self.spec.groups)}")
        for known, given in zip(self.spec.groups, options, strict=True):
            for name, value in given.items():
                self._check(name, known.get(name), value)

    def checked_state(self, group: int, name: str, shape: torch.Size, state: State) -> ParameterState:
        """A state that a peer gave for a parameter of that name and shape in that group of this optimizer; not empty.

        Raises:
            ConfigError: A step could not go on from it.
        """
        given = {key: value for key, value in state.items() if value is not None}
        elementwise: dict[str, torch.Tensor] = {}
        scalars: dict[str, torch.Tensor | float] = {}
        for key in {**self._state_kinds[group], **given}:
            value = given.get(key)
            if self._state_kinds[group].get(key, isinstance(value, torch.Tensor) and value.ndim > 0):
                if not isinstance(value, torch.Tensor) or value.shape != shape or not value.is_floating_point():
                    raise ConfigError(
                        f"the optimizer state of {name!r} lacks {key!r} in its shape: load a matching one"
                    )
                elementwise[key] = value.detach()
            elif isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
                scalars[key] = value.detach().reshape(()).cpu()
            elif isinstance(value, int | float):
                scalars[key] = value
            else:
                raise ConfigError(f"the optimizer state of {name!r} lacks a number {key!r}: load a matching one")
        return ParameterState(elementwise=elementwise, scalars=scalars)

    def _check(self, name: str, known: Option | None, value: Option) -> None:
        same_kind = isinstance(value, bool) == isinstance(known, bool)
        same_kind &= (len(value) if isinstance(value, tuple) else 0) == (len(known) if isinstance(known, tuple) else 0)
        if known is None or not same_kind:
            raise ConfigError(
                f"{self.spec.name} has no option {name!r} like {value!r}: send those it was described with"
            )
        # Zero momentum keeps no state in RMSprop; SGD makes its own when it first needs it.
        keeps = name == "momentum" and self.spec.name != "SGD" and bool(value) != bool(known)
        if keeps or (name in _SHAPES_THE_STATE and value != known):
            raise ConfigError(f"{name} cannot change from {known} to {value} in training: set it before prepare")
        numbers = value if isinstance(value, tuple) else (value,)
        # Beyond it torch divides by zero, or fails to convert to float16, in the middle of an update.
        limit = 1.0 if isinstance(value, tuple) else _LARGEST
        if not all(0 <= number < limit for number in numbers):
            raise ConfigError(f"{name} cannot be {value}: use numbers of at least 0 and below {limit:g}")

    def _tried(self, options: Options) -> dict[str, bool]:
        """Which state a step with these options makes, and whether it is element-wise; torch checks the options."""
        parameter = torch.zeros(1)
        parameter.grad = torch.zeros(1)
        optimizer = _constructed(self._kind, [{"params": [parameter]}], {**options, **self._computed({torch.float32})})
        optimizer.step()
        return {
            name: isinstance(value, torch.Tensor) and value.ndim > 0
            for name, value in optimizer.state[parameter].items()
            if isinstance(value, torch.Tensor | int | float)
        }

    def _computed(self, dtypes: Collection[torch.dtype]) -> dict[str, bool]:
        if self._one_pass and _ONE_PASS.issuperset(dtypes):
            return {"fused": True, "foreach": False}
        return {"foreach": False} if "foreach" in inspect.signature(self._kind).parameters else {}


def describe(optimizer: torch.optim.Optimizer, allowed: Collection[str] = ()) -> OptimizerSpec:
    """How a server can run this optimizer; `allowed` are the names beyond the table that the servers were given.

    Raises:
        ConfigError: They cannot.
    """
    kind = type(optimizer)
    names = [name for name in (*OPTIMIZERS, *allowed) if _resolved(name, allowed) is kind]
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


def options_to_record(options: Sequence[Options]) -> list[dict[str, object]]:
    """Options per group as plain values."""
    return [
        {name: list(value) if isinstance(value, tuple) else value for name, value in group.items()} for group in options
    ]


def options_from_record(record: object) -> tuple[Options, ...]:
    """What `options_to_record` gave, from a peer that may send anything.

    Raises:
        ConfigError: It is nothing of the kind.
    """
    if not isinstance(record, Sequence) or isinstance(record, str | bytes) or not 0 < len(record) <= _MOST_GROUPS:
        raise ConfigError(f"an optimizer has options for 1 to {_MOST_GROUPS} groups: send these")
    return tuple(_received(group) for group in record)


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


def _resolved(name: str, allowed: Collection[str]) -> type[torch.optim.Optimizer]:
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    if name not in allowed:
        raise ConfigError(
            f"this server may not run the optimizer {name[:200]!r}: use {', '.join(OPTIMIZERS)}, or allow it by name on"
            " the server's command line"
        )
    module, _, qualified = name.partition(":")
    try:
        kind = getattr(importlib.import_module(module), qualified)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"the optimizer {name!r} cannot be imported: {error}; give module.path:Class") from error
    if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer):
        raise ConfigError(f"{name!r} is no torch optimizer: allow a class that is one")
    return kind


def _constructed(
    kind: type[torch.optim.Optimizer], groups: list[dict[str, object]], defaults: Options
) -> torch.optim.Optimizer:
    try:
        return kind(groups, **defaults)  # type: ignore[arg-type]  # Options are what the constructor takes.
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{kind.__name__} does not take the options {dict(defaults)}: {error}") from error


def _plain(name: str, value: object) -> Option:
    """An option as plain numbers; a learning rate may be a tensor."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value)
    if isinstance(value, list | tuple) and len(value) <= _MOST_NUMBERS:
        return tuple(float(number) for number in value)
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return float(value)
    raise ConfigError(f"a server cannot be told the option {name}={value!r}: use numbers, pairs of them or bools")


def _received(group: object) -> Options:
    if not isinstance(group, Mapping) or len(group) > _MOST_OPTIONS:
        raise ConfigError(f"a group has at most {_MOST_OPTIONS} options by name: send these")
    options: dict[str, Option] = {}
    for name, value in group.items():
        numbers = value if isinstance(value, list | tuple) and len(value) <= _MOST_NUMBERS else [value]
        if not isinstance(name, str) or not all(_finite(number) for number in numbers):
            raise ConfigError(f"the option {str(name)[:200]!r} is no finite number, bool or pair: send it as one")
        options[name] = _plain(name, value)
    return options


def _finite(number: object) -> bool:
    try:
        return isinstance(number, int | float) and math.isfinite(number)
    except OverflowError:
        return False
