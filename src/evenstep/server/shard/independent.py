"""Tests whether servers can run an optimizer: each has a part of the parameters, and may continue from a snapshot."""

import copy
from collections.abc import Collection, Iterator, Sequence
from math import prod
from typing import Final, TypeAlias, cast, final

import torch

from evenstep.core.errors import ConfigError
from evenstep.protocol.layout import ParameterSpec, ShardLayout
from evenstep.protocol.optimizer import OptimizerSpec, State
from evenstep.server.shard.shard import Shard
from evenstep.server.shard.updates import UpdateRule
from evenstep.tensors.messages import parameter_views, scatter
from evenstep.tensors.optimizers import optimizer_named

_Parameters: TypeAlias = Sequence[tuple[tuple[int, ...], int]]
"""The shape and the param group of each parameter."""

_LENGTH: Final = 3
"""The length of each axis of the parameters that are tried."""
_MAX_KINDS: Final = 6
_SCALES: Final = tuple(10.0**exponent for exponent in range(-9, 13, 3))
"""Scales of the gradients. They ascend, so that each outweighs the earlier ones in the state, and clipping shows."""
_STEPS: Final = 201
_EVERY: Final = 20
"""Of many steps, one in this many is checked, because weights that differ stay different."""
_LEARNING_RATE: Final = 0.01


def require_independent(spec: OptimizerSpec, allowed: Collection[str], parameters: _Parameters) -> None:
    """Train small random parameters of these numbers of axes in three ways, which must agree.

    In one, the gradients of every other parameter differ, and the parameters between them may not change by a bit. One
    continues from the optimizer's state alone. Gradients hold zeros: elements, rows and whole parameters. They span 21
    orders of magnitude; with gradients of one size there are 201 steps.

    The trials miss behaviour that begins later, or only with other gradients, weights, options or shapes, or in dtypes
    other than float64.

    Args:
        spec: The optimizer, and the options of each of its param groups.
        allowed: Names beyond the table.
        parameters: The shape and the param group of each parameter that is trained.

    Raises:
        ConfigError: An update depends on other parameters, the optimizer keeps more than `optimizer.state` holds, or
            it does not step by its learning rate.
    """
    try:
        rateless = any("lr" not in options for options in spec.groups)
        doubt = "it has no option lr, by which servers scale a push" if rateless else _doubt(spec, allowed, parameters)
    except Exception as error:  # A user's class may raise anything.
        doubt = f"its step fails on a plain tensor ({type(error).__name__}: {error})"
    if doubt is not None:
        kind = optimizer_named(spec.name, allowed)
        raise ConfigError(
            f"servers cannot run {kind.__module__}:{kind.__qualname__}: {doubt}; use another optimizer, or a scheme"
            " without servers"
        )


@torch.no_grad()
def _doubt(spec: OptimizerSpec, allowed: Collection[str], parameters: _Parameters) -> str | None:
    """Return why servers cannot run it; None if they can."""
    groups = [{**options, "lr": _LEARNING_RATE} for options in spec.groups]
    distinct = {repr(sorted(options.items())): options for options in groups}
    numbers = {key: number for number, key in enumerate(distinct)}
    rule = UpdateRule(OptimizerSpec(name=spec.name, groups=tuple(distinct.values())), allowed)
    kinds = dict.fromkeys(
        ((_LENGTH,) * len(shape), numbers[repr(sorted(groups[group].items()))])
        for shape, group in parameters
        if prod(shape)
    )
    # Two of each, since every other one gets other gradients.
    tried = [kind for kind in list(kinds)[:_MAX_KINDS] for _ in range(2)]
    return _Trial(rule, tried).doubt(_SCALES) or _Trial(rule, tried).doubt([1.0] * _STEPS, every=_EVERY)


@final
class _Trial:
    """Trains random parameters of these shapes and groups in several shards at once."""

    def __init__(self, rule: UpdateRule, parameters: _Parameters) -> None:
        self._random = torch.Generator().manual_seed(0)
        self._options = rule.spec.groups
        self._layout = ShardLayout.of(
            ParameterSpec(name=str(number), shape=shape, dtype="float64", group=group)
            for number, (shape, group) in enumerate(parameters)
        )
        self._plain, self._changed, self._restarted = (Shard(self._layout, (rule,)) for _ in range(3))
        start = self._drawn(1.0)
        for shard in (self._plain, self._changed):
            shard.initialise(self._message(start))

    def doubt(self, scales: Sequence[float], *, every: int = 1) -> str | None:
        """Return why servers cannot run it; None if they can. One of `every` steps is checked."""
        depends = keeps = False
        for number, gradients in enumerate(self._gradients(scales)):
            checked = number % every == 0
            if checked:
                self._restart()
                self._step(self._restarted, gradients)
            self._plain.leave(None)  # As between commits: an optimizer may not keep where the weights lie.
            self._step(self._plain, gradients)
            self._step(self._changed, [1 - 1000 * each if at % 2 else each for at, each in enumerate(gradients)])
            if checked:
                weights = self._weights(self._plain)
                depends |= not _same(weights[::2], self._weights(self._changed)[::2])
                keeps |= not _same(weights, self._weights(self._restarted))
        for state in cast("list[State]", self._plain.state_dict()["states"]):
            for name, value in state.items():
                if not (value is None or isinstance(value, torch.Tensor | int | float)):
                    return f"its state {name!r} ({type(value).__name__}) is neither a tensor nor a number"
        if keeps:
            return "it keeps more than optimizer.state holds, or draws numbers, so a run could not continue"
        if depends:
            return "its update of a parameter depends on other parameters, which another server may hold"
        return self._rate_doubt(scales[-1])

    def _rate_doubt(self, scale: float) -> str | None:
        before, gradients = self._weights(self._plain), self._drawn(scale)
        self._restart()
        self._step(self._plain, gradients)
        self._step(self._restarted, gradients, rate=_LEARNING_RATE / 2)
        steps = zip(before, self._weights(self._plain), self._weights(self._restarted), strict=True)
        scales = all(_close(whole - each, 2 * (half - each)) for each, whole, half in steps)
        return None if scales else "its step does not scale with its learning rate"

    def _restart(self) -> None:
        """Take the weights of the plain training, and build an optimizer that has its state alone."""
        self._restarted.load_state_dict(copy.deepcopy(self._plain.state_dict()))

    def _step(self, shard: Shard, gradients: Sequence[torch.Tensor], rate: float = _LEARNING_RATE) -> None:
        shard.commit([(self._message(gradients), 1.0)], [{**each, "lr": rate} for each in self._options])

    def _weights(self, shard: Shard) -> list[torch.Tensor]:
        message = torch.empty(self._layout.nbytes, dtype=torch.uint8)
        shard.read_weights(message)
        return parameter_views(self._layout, message)

    def _message(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        message = torch.zeros(self._layout.nbytes, dtype=torch.uint8)
        scatter(tensors, parameter_views(self._layout, message))
        return message

    def _gradients(self, scales: Sequence[float]) -> Iterator[list[torch.Tensor]]:
        """Make random gradients of these sizes. Every other time, each third run of 1, 3, 9, ... elements is zero."""
        for number, scale in enumerate(scales):
            gradients = self._drawn(scale)
            if number % 2:
                width, first = 3 ** (number // 2 % 6), 0
                for each in gradients:
                    places = torch.arange(first, first + each.numel()).view(each.shape)
                    each[places // width % 3 == number % 3] = 0
                    first += each.numel()
            yield gradients

    def _drawn(self, scale: float) -> list[torch.Tensor]:
        shapes = [each.shape for each in self._layout.parameters]
        return [scale * torch.randn(shape, generator=self._random, dtype=torch.float64) for shape in shapes]


def _same(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """True if all bits are equal, of NaNs too."""
    pairs = zip(some, others, strict=True)
    return all(torch.equal(one.view(torch.int64), other.view(torch.int64)) for one, other in pairs)


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one, other) or bool(torch.allclose(one, other, rtol=1e-8, atol=1e-12, equal_nan=True))
