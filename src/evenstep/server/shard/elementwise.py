"""Tries whether an optimizer is element-wise, so that servers can run it on any slice of the flat weights."""

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod
from typing import Final, Self, TypeAlias, final

import torch

from evenstep.core.errors import ConfigError
from evenstep.protocol.layout import ParameterSpec, ShardLayout
from evenstep.protocol.optimizer import OptimizerSpec
from evenstep.server.shard.chunks import Chunks, cut
from evenstep.server.shard.updates import UpdateRule
from evenstep.tensors.messages import flat_views, parameter_views
from evenstep.tensors.optimizers import optimizer_named

_Parameters: TypeAlias = Sequence[tuple[tuple[int, ...], int]]
"""The shape and the param group of each parameter."""

_MAX_ELEMENTS: Final = 2**21
"""Of all parameters that are tried in their shapes. It keeps the time at about a second, and memory below 400 MB."""
_SMALL: Final = 3
"""The length of each axis of the parameters that are trained for more than a few steps."""
_MAX_SMALL: Final = 6
_SCALES: Final = tuple(10.0**exponent for exponent in range(-9, 13, 3))
"""Of the gradients. They ascend, so that each outweighs what the state holds of those before, and clipping shows."""
_STEPS: Final = 1001
_EVERY: Final = 20
"""Of many steps, every which one is checked; weights that differ stay different."""
_LEARNING_RATE: Final = 0.01
_NOT_ELEMENTWISE: Final = (
    "it is not element-wise: the update of an element depends on others, on the shape or on chance"
)
_KEEPS_MORE: Final = "it keeps more than optimizer.state holds, so a run could not continue from a snapshot"


def require_elementwise(spec: OptimizerSpec, allowed: Collection[str], parameters: _Parameters) -> None:
    """Train random tensors of these shapes as servers do, in flat slices, and as one process does; both must agree.

    Their updates are also compared with those of two other runs. In one, half of the gradients are others, and no other
    element may change by a bit. One continues from its state alone. Gradients hold zeros: elements, rows and whole
    parameters. Small tensors are trained with gradients of 21 orders of magnitude, and for 1001 steps.

    What no trial can find: what only begins later, or only with other gradients, weights or options, or in other dtypes
    than float64. The axes of parameters of more than two million elements in all are shortened, all to the same length,
    which is 911 for GPT-2 and 273 for a ResNet-50. What only begins with longer axes is not found either.

    Args:
        spec: The optimizer, and the options of each of its param groups.
        allowed: Names beyond the table.
        parameters: The shape and the param group of each parameter that is trained.

    Raises:
        ConfigError: The optimizer is not element-wise, keeps more than `optimizer.state` holds, or does not step by its
            learning rate.
    """
    try:
        rateless = any("lr" not in options for options in spec.groups)
        doubt = "it has no option lr, by which servers scale a push" if rateless else _doubt(spec, allowed, parameters)
    except Exception as error:  # Whatever a user's class raises.
        doubt = f"its step fails on a plain tensor ({type(error).__name__}: {error})"
    if doubt is not None:
        kind = optimizer_named(spec.name, allowed)
        raise ConfigError(
            f"servers cannot run {kind.__module__}:{kind.__qualname__}: {doubt}; use an element-wise optimizer, or a"
            " scheme without servers"
        )


@torch.no_grad()
def _doubt(spec: OptimizerSpec, allowed: Collection[str], parameters: _Parameters) -> str | None:
    """Why servers cannot run it; None if they can."""
    groups = [{**options, "lr": _LEARNING_RATE} for options in spec.groups]
    distinct = {repr(sorted(options.items())): options for options in groups}
    numbers = {key: number for number, key in enumerate(distinct)}
    rule = UpdateRule(OptimizerSpec(name=spec.name, groups=tuple(distinct.values())), allowed)
    tried = [(shape, numbers[repr(sorted(groups[group].items()))]) for shape, group in parameters if prod(shape)]
    small = dict.fromkeys(((_SMALL,) * len(shape), group) for shape, group in tried)
    few = list(small)[:_MAX_SMALL]
    return (
        _Trial(rule, _bounded(tried)).doubt([1.0] * 2)
        or _Trial(rule, few).doubt(_SCALES)
        or _Trial(rule, few).doubt([1.0] * _STEPS, every=_EVERY)
    )


def _bounded(parameters: _Parameters) -> _Parameters:
    """Different ones of these parameters, whose longest axes are shortened until all together are small enough."""
    longest = max((axis for shape, _ in parameters for axis in shape), default=1)
    while True:
        found = dict.fromkeys((tuple(min(axis, longest) for axis in shape), group) for shape, group in parameters)
        if longest == 1 or sum(prod(shape) for shape, _ in found) <= _MAX_ELEMENTS:
            return list(found)
        longest = longest * 7 // 8


@final
class _Trial:
    """Trains random parameters of these shapes in several ways at once."""

    def __init__(self, rule: UpdateRule, parameters: _Parameters) -> None:
        self._layout = ShardLayout.of(
            ParameterSpec(name=str(number), shape=shape, dtype="float64", group=group)
            for number, (shape, group) in enumerate(parameters)
        )
        self._random = torch.Generator().manual_seed(0)
        self._count = self._layout.nbytes // 8
        start = self._drawn()
        self._whole = _Whole(rule, self._layout, start)
        self._changed = _Whole(rule, self._layout, start)
        self._restarted = _Whole(rule, self._layout, start)
        self._served = _Served(rule, self._layout, start)
        self._kept = torch.rand(self._count, generator=self._random) < 0.5

    def doubt(self, scales: Sequence[float], *, every: int = 1) -> str | None:
        """Why servers cannot run it; None if they can. One of `every` steps is checked."""
        depends = keeps = differs = False
        for number, gradient in enumerate(self._gradients(scales)):
            checked = number % every == 0
            if checked:
                self._restarted.continue_from(self._whole)
                self._restarted.step(gradient)
            self._whole.step(gradient)
            self._changed.step(torch.where(self._kept, gradient, -1000 * gradient.flip(0)))
            self._served.step(gradient)
            if checked:
                depends |= bool(((_bits(self._whole) != _bits(self._changed)) & self._kept).any())
                keeps |= not torch.equal(_bits(self._whole), _bits(self._restarted))
                differs |= not _close(self._whole.weights, self._served.weights)
        if (name := self._whole.not_servable()) is not None:
            return f"its state {name} has neither the shape of the parameter nor is a number"
        if depends or (differs and not keeps):
            return _NOT_ELEMENTWISE
        return _KEEPS_MORE if keeps else self._rate_doubt(scales[-1])

    def _rate_doubt(self, scale: float) -> str | None:
        before, gradient = self._whole.weights.clone(), self._drawn() * scale
        self._restarted.continue_from(self._whole, _LEARNING_RATE / 2)
        for run in (self._whole, self._restarted):
            run.step(gradient)
        scales = _close(self._whole.weights - before, 2 * (self._restarted.weights - before))
        return None if scales else "its step does not scale with its learning rate"

    def _gradients(self, scales: Sequence[float]) -> Iterator[torch.Tensor]:
        """Random gradients of these sizes. In every other one, each third run of 1, 3, 9, ... elements is zero."""
        for number, scale in enumerate(scales):
            gradient = self._drawn() * scale
            if number % 2:
                width = 3 ** (number // 2 % 8)
                gradient[torch.arange(self._count) // width % 3 == number % 3] = 0
            yield gradient

    def _drawn(self) -> torch.Tensor:
        return torch.randn(self._count, generator=self._random).double()  # Twice as fast as in float64.


@final
class _Whole:
    """An optimizer on parameters in their shapes, as in one process."""

    def __init__(self, rule: UpdateRule, layout: ShardLayout, start: torch.Tensor) -> None:
        self.weights = start.clone()
        self._rule = rule
        self._layout = layout
        self._gradient = torch.zeros_like(start)
        views = (parameter_views(layout, each.view(torch.uint8)) for each in (self.weights, self._gradient))
        self._parameters = []
        for weights, gradient in zip(*views, strict=True):
            self._parameters.append(torch.nn.Parameter(weights))
            self._parameters[-1].grad = gradient
        self._optimizer = self._built()

    def continue_from(self, other: Self, rate: float = _LEARNING_RATE) -> None:
        """Take the other's weights, and build an optimizer that has its state alone."""
        self.weights.copy_(other.weights)
        self._optimizer = self._built()
        for mine, theirs in zip(self._parameters, other._parameters, strict=True):
            if state := other._optimizer.state.get(theirs):
                self._optimizer.state[mine].update(copy.deepcopy(state))
        for group in self._optimizer.param_groups:
            group["lr"] = rate

    def step(self, gradient: torch.Tensor) -> None:
        """Step all parameters together."""
        self._gradient.copy_(gradient)
        self._optimizer.step()

    def not_servable(self) -> str | None:
        """An entry of the state that servers cannot keep; None if there is none."""
        for parameter in self._parameters:
            state: Mapping[str, object] = self._optimizer.state.get(parameter, {})
            for name, value in state.items():
                if not _is_servable(value, parameter.shape):
                    shape = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
                    return f"{name!r} ({shape})"
        return None

    def _built(self) -> torch.optim.Optimizer:
        members: list[list[torch.Tensor]] = [[] for _ in self._rule.spec.groups]
        for spec, parameter in zip(self._layout.parameters, self._parameters, strict=True):
            members[spec.group].append(parameter)
        return self._rule.build(members)


@final
class _Served:
    """The same optimizer as servers run it: on flat slices, which end anywhere, one after another."""

    def __init__(self, rule: UpdateRule, layout: ShardLayout, start: torch.Tensor) -> None:
        self.weights = start.clone()
        cuts = [cut([0, block.elements], block.elements // 3 + 1) for block in layout.blocks]
        self._chunks = Chunks(layout, self.weights.view(torch.uint8), [rule], cuts)
        self._gradient = torch.zeros_like(start)
        self._flats = flat_views(layout, self._gradient.view(torch.uint8))

    def step(self, gradient: torch.Tensor) -> None:
        """Step each slice by itself."""
        self._gradient.copy_(gradient)
        for chunk in self._chunks.all:
            self._chunks.step([chunk], [chunk.of(self._flats)])


def _is_servable(value: object, shape: torch.Size) -> bool:
    if isinstance(value, torch.Tensor):
        return value.ndim == 0 or (value.shape == shape and value.is_floating_point())
    return value is None or isinstance(value, int | float)


def _bits(run: _Whole) -> torch.Tensor:
    """The weights in a form in which NaNs are equal, too."""
    return run.weights.view(torch.int64)


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one, other) or bool(torch.allclose(one, other, rtol=1e-8, atol=1e-12, equal_nan=True))
