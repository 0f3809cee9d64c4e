"""Builds the optimizers that a worker described to the server, and checks their options and states."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Final, cast, final

import torch

from evenstep.core.errors import ConfigError
from evenstep.protocol.optimizer import OptimizerSpec, Option, Options, State
from evenstep.tensors.optimizers import OPTIMIZERS, optimizer_named

_SHAPES_THE_STATE: Final = frozenset({"amsgrad", "centered"})
_ONE_PASS: Final = frozenset({torch.float32, torch.float64})
_LARGEST: Final = 60_000.0


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ParameterState:
    """A parameter's state: tensors of the parameter's shape, and numbers such as `step`."""

    elementwise: Mapping[str, torch.Tensor]
    scalars: Mapping[str, torch.Tensor | float]

    def alike(self) -> tuple[object, ...]:
        """What parameters must have in common to share a chunk."""
        return *sorted(self.elementwise), *sorted((key, float(value)) for key, value in self.scalars.items())


@final
class UpdateRule:
    """The update rule of a spec. `allowed` are names "module.path:Class" beyond the table.

    Raises:
        ConfigError: The name is not allowed, or the optimizer does not take the options.
    """

    __slots__ = ("_kind", "_one_pass", "_state_kinds", "spec")

    def __init__(self, spec: OptimizerSpec, allowed: Collection[str] = ()) -> None:
        self.spec = spec
        self._kind = optimizer_named(spec.name, allowed)
        self._one_pass = spec.name in OPTIMIZERS and "fused" in inspect.signature(self._kind).parameters
        self._state_kinds = [self._tried(options) for options in spec.groups]

    def build(self, parameters: Sequence[Sequence[torch.Tensor]]) -> torch.optim.Optimizer:
        """A new optimizer of these parameters, one sequence for each group of the spec; some may be empty.

        float32 and float64 use torch's fused form if there is one: the same arithmetic in a single pass, without
        temporaries. (With several threads torch wakes all of them for the smallest tensor: run a server with one.)
        Half precision uses torch's plain loop, as on a worker's CPU, which rounds every operation to that dtype.
        """
        groups: list[dict[str, object]] = [
            {**options, **self._computed({parameter.dtype for parameter in group}), "params": list(group)}
            for options, group in zip(self.spec.groups, parameters, strict=True)
        ]
        # Also as defaults: Adagrad reads its initial accumulator value only there.
        return _constructed(self._kind, groups, self.spec.groups[0])

    def check(self, options: Sequence[Options]) -> None:
        """Check that these options, one mapping per group, can be set between two commits.

        Raises:
            ConfigError: An option is unknown, of the wrong kind or out of range, or would need another state.
        """
        if len(options) != len(self.spec.groups):
            raise ConfigError(f"options came for {len(options)} groups: send those of all {len(self.spec.groups)}")
        for known, given in zip(self.spec.groups, options, strict=True):
            for name, value in given.items():
                self._check(name, known.get(name), value)

    def checked_state(self, group: int, name: str, shape: torch.Size, state: State) -> ParameterState:
        """Check a state, not empty, that a peer sent for the parameter of that name and shape in that group.

        Raises:
            ConfigError: A step could not continue from it.
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
        # Without momentum RMSprop has no state for it; SGD creates its state when it first needs it.
        keeps = name == "momentum" and self.spec.name != "SGD" and bool(value) != bool(known)
        if keeps or (name in _SHAPES_THE_STATE and value != known):
            raise ConfigError(f"{name} cannot change from {known} to {value} in training: set it before prepare")
        numbers = value if isinstance(value, tuple) else (value,)
        # Beyond the limit torch divides by zero, or fails to convert to float16, in the middle of an update.
        limit = 1.0 if isinstance(value, tuple) and self.spec.name in OPTIMIZERS else _LARGEST
        if not all(0 <= number < limit for number in numbers):
            raise ConfigError(f"{name} cannot be {value}: use numbers of at least 0 and below {limit:g}")

    def _tried(self, options: Options) -> dict[str, bool]:
        """The state that a step with these options creates, and whether each entry is element-wise."""
        parameter = torch.zeros(1)
        parameter.grad = torch.zeros(1)
        optimizer = _constructed(self._kind, [{"params": [parameter]}], {**options, **self._computed({torch.float32})})
        step_of(optimizer)()  # As in `Chunks`.
        return {
            name: isinstance(value, torch.Tensor) and value.ndim > 0
            for name, value in optimizer.state[parameter].items()
            if isinstance(value, torch.Tensor | int | float)
        }

    def _computed(self, dtypes: Collection[torch.dtype]) -> dict[str, bool]:
        if self._one_pass and _ONE_PASS.issuperset(dtypes):
            return {"fused": True, "foreach": False}
        return {"foreach": False} if "foreach" in inspect.signature(self._kind).parameters else {}


def step_of(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    """The optimizer's step without torch's wrappers for hooks and profilers.

    They take longer than the update of a small model, and so does what SGD does before it calls its kernel.
    """
    step = MethodType(inspect.unwrap(type(optimizer).step), optimizer)
    if type(optimizer) is not torch.optim.SGD:
        return step
    alike = [
        (number, [weights for weights in group["params"] if weights.dtype == dtype])
        for number, group in enumerate(optimizer.param_groups)
        for dtype in dict.fromkeys(weights.dtype for weights in group["params"])
    ]
    return partial(_sgd_step, optimizer, alike, step)


def _sgd_step(
    optimizer: torch.optim.SGD, alike: Sequence[tuple[int, Sequence[torch.Tensor]]], step: Callable[[], object]
) -> None:
    """SGD's `step`. Without momentum there is no state, so its fused form is one call of the kernel.

    `alike`: the weights of each group and dtype, with the number of the group.
    """
    groups = optimizer.param_groups
    if any(group["momentum"] or not group["fused"] for group in groups):
        step()
        return
    for number, weights in alike:
        group = groups[number]
        present = [each for each in weights if each.grad is not None]
        if present:
            torch._fused_sgd_(
                present,
                [cast("torch.Tensor", each.grad) for each in present],
                [],
                weight_decay=group["weight_decay"],
                momentum=0.0,
                lr=group["lr"],
                dampening=group["dampening"],
                nesterov=group["nesterov"],
                maximize=group["maximize"],
                is_first_step=False,
            )


def _constructed(
    kind: type[torch.optim.Optimizer], groups: list[dict[str, object]], defaults: Options
) -> torch.optim.Optimizer:
    try:
        return kind(groups, **defaults)  # type: ignore[arg-type]  # Options are what the constructor takes.
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{kind.__name__} does not take the options {dict(defaults)}: {error}") from error
