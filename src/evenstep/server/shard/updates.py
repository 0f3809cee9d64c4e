"""Builds the optimizers that a worker described to the server, and checks their options and states."""

import inspect
from collections.abc import Callable, Collection, Sequence
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
class UpdateRule:
    """The update rule of a spec. `allowed` are names "module.path:Class" beyond the table.

    Raises:
        ConfigError: The name is not allowed, or the optimizer does not take the options.
    """

    __slots__ = ("_kind", "_one_pass", "spec")

    def __init__(self, spec: OptimizerSpec, allowed: Collection[str] = ()) -> None:
        self.spec = spec
        self._kind = optimizer_named(spec.name, allowed)
        self._one_pass = spec.name in OPTIMIZERS and "fused" in inspect.signature(self._kind).parameters
        for options in spec.groups:
            self._constructed([{"params": []}], options)

    def build(self, parameters: Sequence[Sequence[torch.Tensor]]) -> torch.optim.Optimizer:
        """Make a new optimizer of these parameters, one sequence for each group of the spec; some may be empty.

        float32 and float64 use torch's fused form if there is one: the same arithmetic in a single pass, without
        temporaries. (With several threads torch wakes all of them for the smallest tensor: run a server with one.)
        Half precision uses torch's plain loop, as on a worker's CPU, which rounds every operation to that dtype.
        """
        groups: list[dict[str, object]] = [
            {**options, **self._computed({parameter.dtype for parameter in group}), "params": list(group)}
            for options, group in zip(self.spec.groups, parameters, strict=True)
        ]
        # Also as defaults: Adagrad reads its initial accumulator value only there.
        return self._constructed(groups, self.spec.groups[0])

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

    def checked_state(self, group: int, name: str, parameter: torch.Tensor, given: State) -> State:
        """Check a state, not empty, that a peer sent for the parameter of that name in that group, and return a copy.

        Its entries must be those that a step creates, or others with the parameter's shape or a number.

        Raises:
            ConfigError: A step could not continue from it.
        """
        expected = self._created(group, parameter)
        state: dict[str, object] = {}
        for key in {**expected, **given}:
            value = given.get(key)
            unknown = parameter if isinstance(value, torch.Tensor) and value.ndim else parameter.new_zeros(())
            state[key] = _copied_as(expected.get(key, unknown), value)
            if state[key] is None:
                raise ConfigError(
                    f"the optimizer state of {name!r} lacks a matching {key!r}: load one of its optimizer"
                )
        return state

    @torch.no_grad()
    def _created(self, group: int, parameter: torch.Tensor) -> dict[str, object]:
        """Return the state that a step of this parameter creates."""
        tried = torch.nn.Parameter(torch.zeros_like(parameter))
        tried.grad = torch.zeros_like(parameter)
        members: list[list[torch.Tensor]] = [[] for _ in self.spec.groups]
        members[group].append(tried)
        optimizer = self.build(members)
        step_of(optimizer)()  # As in `Shard`.
        return {name: value for name, value in optimizer.state[tried].items() if value is not None}

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

    def _constructed(self, groups: list[dict[str, object]], defaults: Options) -> torch.optim.Optimizer:
        try:
            return self._kind(groups, **defaults)  # type: ignore[arg-type]  # Options are what the constructor takes.
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{self._kind.__name__} does not take the options {dict(defaults)}: {error}") from error

    def _computed(self, dtypes: Collection[torch.dtype]) -> dict[str, bool]:
        if self._one_pass and _ONE_PASS.issuperset(dtypes):
            return {"fused": True, "foreach": False}
        return {"foreach": False} if "foreach" in inspect.signature(self._kind).parameters else {}


def step_of(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    """Return the optimizer's step without torch's wrappers for hooks, profilers and gradients.

    They take longer than the update of a small model. Call it where torch records no gradients.
    """
    return MethodType(inspect.unwrap(type(optimizer).step), optimizer)


def _copied_as(like: object, value: object) -> object:
    """Return a copy of a value as a tensor of another's shape and dtype, or as a number; None if that is impossible."""
    if isinstance(like, torch.Tensor) and like.ndim:
        fits = isinstance(value, torch.Tensor) and value.shape == like.shape and value.is_floating_point()
        return cast("torch.Tensor", value).detach().to(like.dtype, copy=True) if fits else None
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, int | float):
        return None
    return torch.tensor(value, dtype=like.dtype) if isinstance(like, torch.Tensor) else type(like)(value)  # type: ignore[call-arg]
