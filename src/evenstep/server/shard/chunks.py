"""Splits a shard's weights into chunks, runs torch optimizers on them, and converts their state per parameter."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice, pairwise
from typing import Self, cast, final

import torch

from evenstep.core.errors import ConfigError
from evenstep.protocol.layout import Block, ParameterSpec, ShardLayout
from evenstep.protocol.optimizer import Options, State
from evenstep.server.shard.updates import ParameterState, UpdateRule, step_of
from evenstep.tensors.messages import flat_views


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chunk:
    """Elements `start` to `stop` of a block. A torch optimizer sees it as one parameter."""

    block: int
    start: int
    stop: int
    weights: torch.Tensor

    def of(self, flats: Sequence[torch.Tensor]) -> torch.Tensor:
        """These elements in the blocks of another message."""
        return flats[self.block][self.start : self.stop]


@final
class Chunks:
    """All chunks of a shard, in the order of its message, and its optimizers.

    Args:
        layout: The layout of the shard.
        weights: A message, which the optimizers change in place.
        updates: The run's optimizers. Groups are numbered over all of them.
        cuts: The edges of the chunks in each block, its end included.
    """

    def __init__(
        self, layout: ShardLayout, weights: torch.Tensor, updates: Sequence[UpdateRule], cuts: Sequence[Sequence[int]]
    ) -> None:
        groups = [(number, group) for number, update in enumerate(updates) for group in range(len(update.spec.groups))]
        if layout.blocks[-1].group >= len(groups):
            raise ConfigError(
                f"the layout has a group {layout.blocks[-1].group}: describe all {len(groups)} groups in it"
            )
        self.all = tuple(
            Chunk(block=block, start=start, stop=stop, weights=flat[start:stop])
            for block, (flat, edges) in enumerate(zip(flat_views(layout, weights), cuts, strict=True))
            for start, stop in pairwise(edges)
        )
        self._layout = layout
        self._updates = updates
        self._owners = [groups[block.group][0] for block in layout.blocks]
        members: list[list[list[torch.Tensor]]] = [[[] for _ in update.spec.groups] for update in updates]
        for chunk in self.all:
            owner, group = groups[layout.blocks[chunk.block].group]
            members[owner][group].append(chunk.weights)
        self._optimizers = [update.build(parameters) for update, parameters in zip(updates, members, strict=True)]
        self._steps = [step_of(each) for each in self._optimizers]
        self._options: list[Options] = []

    @classmethod
    def with_states(
        cls,
        layout: ShardLayout,
        weights: torch.Tensor,
        updates: Sequence[UpdateRule],
        states: Mapping[str, State],
        largest: int,
    ) -> Self:
        """Chunks that continue from states by parameter. Parameters without a state start new.

        A chunk has one `step` (and other scalars), so chunks end where the scalars of neighbours differ.

        Raises:
            ConfigError: An optimizer could not continue from its state.
        """
        checked = dict(_checked(layout, updates, states))
        cuts = [cut(_edges(block, checked), largest) for block in layout.blocks]
        chunks = cls(layout, weights, updates, cuts)
        joined: list[State] = []
        for _, pieces in groupby(chunks._pieces(), key=lambda piece: id(piece.chunk)):
            joined.append(_joined(list(pieces), checked))
        chunks.load(joined)
        return chunks

    def set_options(self, options: Sequence[Options]) -> None:
        """Set options, one mapping for each group of the run. Options that it does not name stay.

        Raises:
            ConfigError: As for `UpdateRule.check`; nothing has changed then.
        """
        if list(options) == self._options:
            return
        expected = sum(len(update.spec.groups) for update in self._updates)
        if len(options) != expected:
            raise ConfigError(f"options came for {len(options)} groups: send those of all {expected}")
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        changes: list[Options] = [
            {name: value for name, value in given.items() if group.get(name) != value}
            for group, given in zip(groups, options, strict=True)
        ]
        rest = iter(changes)
        for update in self._updates:
            update.check(list(islice(rest, len(update.spec.groups))))
        for group, given in zip(groups, changes, strict=True):
            group.update(given)
        self._options = list(options)

    def options(self) -> list[Options]:
        """The present options of each group of the run."""
        return [
            {name: group[name] for name in known}
            for update, optimizer in zip(self._updates, self._optimizers, strict=True)
            for known, group in zip(update.spec.groups, optimizer.param_groups, strict=True)
        ]

    def step(self, chunks: Sequence[Chunk], gradients: Sequence[torch.Tensor]) -> None:
        """Update these chunks only. The gradients are not kept."""
        for chunk, gradient in zip(chunks, gradients, strict=True):
            chunk.weights.grad = gradient
        try:
            for owner in sorted({self._owners[chunk.block] for chunk in chunks}):
                self._steps[owner]()
        finally:
            for chunk in chunks:
                chunk.weights.grad = None

    def state(self, chunk: Chunk) -> State:
        """The optimizer's own state of a chunk. Most optimizers create it at the first update; it is empty before."""
        return cast("State", self._optimizers[self._owners[chunk.block]].state.get(chunk.weights, {}))

    def load(self, states: Sequence[State]) -> None:
        """Continue from states by chunk, whose tensors become the optimizers'. An empty state changes nothing."""
        for owner, optimizer in enumerate(self._optimizers):
            given = [state for chunk, state in zip(self.all, states, strict=True) if self._owners[chunk.block] == owner]
            state_dict = optimizer.state_dict()
            state_dict["state"].update({index: dict(state) for index, state in enumerate(given) if state})
            optimizer.load_state_dict(state_dict)

    def states(self) -> Iterator[tuple[str, dict[str, object]]]:
        """The state of each parameter that has one, in the parameter's shape: copies, made one at a time."""
        for _, group in groupby(self._pieces(), key=lambda piece: piece.parameter.name):
            pieces = list(group)
            state: dict[str, object] = {}
            for key, value in self.state(pieces[0].chunk).items():
                if isinstance(value, torch.Tensor) and value.ndim:
                    state[key] = self._whole(pieces, key, value.dtype)
                else:
                    state[key] = value.clone() if isinstance(value, torch.Tensor) else value
            if state:
                yield pieces[0].parameter.name, state

    def _whole(self, pieces: "Sequence[_Piece]", key: str, dtype: torch.dtype) -> torch.Tensor:
        whole = torch.empty(pieces[0].parameter.shape, dtype=dtype)
        for piece in pieces:
            part = cast("torch.Tensor", self.state(piece.chunk)[key])
            whole.view(-1)[piece.in_parameter].copy_(part[piece.in_chunk])
        return whole

    def _pieces(self) -> "Iterator[_Piece]":
        """The overlaps of parameters and chunks, in the order of the message."""
        chunks = iter(self.all)
        for block in self._layout.blocks:
            chunk: Chunk | None = None
            begin = 0
            for parameter in block.parameters:
                at, end = begin, begin + parameter.elements
                while at < end:
                    if chunk is None or at == chunk.stop:
                        chunk = next(chunks)
                    stop = min(end, chunk.stop)
                    yield _Piece(
                        parameter=parameter,
                        chunk=chunk,
                        in_parameter=slice(at - begin, stop - begin),
                        in_chunk=slice(at - chunk.start, stop - chunk.start),
                    )
                    at = stop
                begin = end


def cut(edges: Sequence[int], largest: int) -> list[int]:
    """The edges, and more of them so that at most `largest` elements lie between two."""
    return [edges[0], *(min(at + largest, end) for begin, end in pairwise(edges) for at in range(begin, end, largest))]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Piece:
    """The overlap of a parameter and a chunk."""

    parameter: ParameterSpec
    chunk: Chunk
    in_parameter: slice
    in_chunk: slice


def _checked(
    layout: ShardLayout, updates: Sequence[UpdateRule], states: Mapping[str, State]
) -> Iterator[tuple[str, ParameterState]]:
    groups = [(update, group) for update in updates for group in range(len(update.spec.groups))]
    for parameter in layout.parameters:
        state = states.get(parameter.name)
        if state and any(value is not None for value in state.values()):
            update, group = groups[parameter.group]
            yield parameter.name, update.checked_state(group, parameter.name, torch.Size(parameter.shape), state)


def _edges(block: Block, states: Mapping[str, ParameterState]) -> list[int]:
    """The ends of the block, and the places where the scalars of neighbouring parameters differ."""
    edges = [0]
    at = 0
    before: object = None
    for parameter in block.parameters:
        state = states.get(parameter.name)
        scalars = None if state is None else state.alike()
        if at > 0 and parameter.elements and scalars != before:
            edges.append(at)
        if parameter.elements:
            before = scalars
        at += parameter.elements
    return [*edges, at]


def _joined(pieces: Sequence[_Piece], states: Mapping[str, ParameterState]) -> State:
    """A chunk's state from those of its parameters, which either all have one or all have none."""
    first = states.get(pieces[0].parameter.name)
    if first is None:
        return {}
    # Optimizers count in place, so each chunk needs a copy.
    state: dict[str, object] = {
        key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in first.scalars.items()
    }
    for key in first.elementwise:
        joined = torch.empty_like(pieces[0].chunk.weights)
        for piece in pieces:
            given = states[piece.parameter.name].elementwise[key]
            joined[piece.in_chunk].copy_(given.reshape(-1)[piece.in_parameter])
        state[key] = joined
    return state
