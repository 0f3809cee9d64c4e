"""A shard's weights and optimizer state, and the updates on them. Others decide which pushes count, and how much.

It is deterministic and not thread-safe.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias, cast, final

import torch

from evenstep.core.errors import ConfigError
from evenstep.protocol.layout import ShardLayout, aligned
from evenstep.protocol.optimizer import Options, State
from evenstep.server.shard.chunks import Chunk, Chunks, cut
from evenstep.server.shard.sums import add_up, moved_on, wide
from evenstep.server.shard.updates import UpdateRule
from evenstep.tensors.messages import all_finite, as_message, flat_views, norm_of

Gradients: TypeAlias = Sequence[tuple[torch.Tensor | memoryview | list[torch.Tensor], float]]
"""Messages of gradients, in the shard's layout, with their weights."""

_Counted: TypeAlias = Sequence[tuple[Sequence[torch.Tensor], float]]

_LARGEST_CHUNK: Final = 2**20
_SMALLEST_CHUNK: Final = 2**16
_MIN_CHUNKS: Final = 16


_LARGEST_USE: Final = 3
"""Wide copies of a chunk in scratch memory: its sum, the distance that the weights moved, and the sum's size."""


class _MakesUp(NamedTuple):
    """The weights that a gradient was computed on, by block, and the compensation of each group."""

    stale: list[torch.Tensor]
    compensation: Sequence[float]


@final
class Shard:
    """The weights, initially zeros, and the optimizers over them.

    The optimizers see the weights in chunks. Since they are element-wise, the result is the same, and an update needs
    only a few megabytes besides weights and state. Methods never change the messages that they read.

    Args:
        layout: What the shard holds.
        updates: The run's optimizers, in order. Groups are numbered over all of them, as in the layout.
        chunk_elements: The largest chunk. None: a sixteenth of the weights, but 2^16 to 2^20 elements. Smaller chunks
            cost Python time, and larger ones gain little (benchmarked for SGD and Adam).

    Raises:
        ConfigError: The layout has groups that the optimizers lack.
    """

    def __init__(
        self, layout: ShardLayout, updates: Sequence[UpdateRule], *, chunk_elements: int | None = None
    ) -> None:
        self.layout = layout
        self._updates = tuple(updates)
        share = aligned(sum(block.elements for block in layout.blocks) // _MIN_CHUNKS)
        self._largest = chunk_elements or min(max(share, _SMALLEST_CHUNK), _LARGEST_CHUNK)
        self._weights = torch.zeros(layout.nbytes, dtype=torch.uint8)
        cuts = [cut([0, block.elements], self._largest) for block in layout.blocks]
        self._chunks = Chunks(layout, self._weights, self._updates, cuts)
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def initialise(self, weights: torch.Tensor | memoryview) -> None:
        """Copy the weights from a message."""
        self._weights.copy_(as_message(self.layout, weights))

    def read_weights(self, into: torch.Tensor | memoryview, ahead: Sequence[float] = ()) -> None:
        """Write the weights into a message.

        `ahead`, one number for each group of the run, moves them along the momentum (`core.sync.rate.look_ahead`).
        """
        if not any(ahead):
            as_message(self.layout, into).copy_(self._weights)
            return
        flats = flat_views(self.layout, into)
        options = self._chunks.options()
        for chunk in self._chunks.all:
            group = self.layout.blocks[chunk.block].group
            moved_on(chunk.weights, self._chunks.state(chunk), options[group], ahead[group], out=chunk.of(flats))

    def finite(self) -> bool:
        """Whether no weight is NaN or infinite. Needs no further memory."""
        return all_finite(flat_views(self.layout, self._weights))

    def commit(
        self,
        gradients: Gradients,
        options: Sequence[Options],
        factors: Sequence[float] = (),
        *,
        stale: torch.Tensor | None = None,
        compensation: Sequence[float] = (),
        direct: Sequence[float] = (),
    ) -> None:
        """Update the weights once, with the weighted sum of the messages times each group's factor.

        Messages are added in order. A message of weight 0 is ignored, even if it holds NaNs. If none counts, the
        weights do not change. The update is computed in the dtype of the weights, as torch does on a worker, but
        half-precision messages are summed in float32 and rounded once.

        Args:
            gradients: Messages and weights.
            options: One mapping for each group of the run, as for `Chunks.set_options`.
            factors: One number, at least 0, for each group of the run; empty for 1.
            stale: The weights that the gradients were computed on, a message; None if they are the present ones.
            compensation: One number for each group of the run, which corrects for the weights' change since then
                (`core.sync.rate.Step`); empty for none.
            direct: One number for each group of the run: how far the weights move by the sum itself, before the
                optimizer's step; empty for 0.

        Raises:
            ConfigError: As for `UpdateRule.check`; nothing has changed then.
        """
        messages = self._counted(gradients)
        self._chunks.set_options(options)
        makes_up = (
            _MakesUp(flat_views(self.layout, stale), compensation) if stale is not None and any(compensation) else None
        )
        as_it_is = len(messages) == 1 and messages[0][1] == 1.0 and all(factor == 1.0 for factor in factors)
        as_it_is &= makes_up is None and not any(direct)
        if as_it_is:
            self._chunks.step(self._chunks.all, [chunk.of(messages[0][0]) for chunk in self._chunks.all])
        elif messages:
            for chunks in self._batches(_LARGEST_USE if makes_up is not None else 1):
                sums = self._sums(chunks, messages, factors, makes_up)
                if any(direct):
                    self._move(chunks, sums, direct)
                self._chunks.step(chunks, sums)

    def squared_norm(self, gradients: Gradients) -> float:
        """The squared norm of the weighted sum of the messages.

        It is not finite if an element of the sum is not. Otherwise it overflows only if float64 does.
        """
        messages = self._counted(gradients)
        if not messages:
            return 0.0
        if len(messages) == 1:
            flats, weight = messages[0]
            return weight * weight * sum(_squares(chunk.of(flats)) for chunk in self._chunks.all)
        return sum(_squares(total) for chunks in self._batches() for total in self._sums(chunks, messages))

    def optimizer_state(self) -> Iterator[tuple[str, dict[str, object]]]:
        """The state of each parameter by name, as torch has it, in the parameter's shape.

        The copies are made one at a time, so that sending them needs no second copy of everything. Parameters without
        a state, before the first update, are left out.
        """
        return self._chunks.states()

    def load_optimizer_state(self, states: Mapping[str, State]) -> None:
        """Continue from states by parameter name, as torch has them.

        Parameters without a state start new. States of other parameters are ignored.

        Raises:
            ConfigError: An optimizer could not continue from a state; nothing has changed then.
        """
        options = self._chunks.options()
        chunks = Chunks.with_states(self.layout, self._weights, self._updates, states, self._largest)
        chunks.set_options(options)
        self._chunks = chunks

    def state_dict(self) -> dict[str, object]:
        """For `torch.save`, and `torch.load` with `weights_only`. The tensors are the shard's: save before a commit."""
        return {
            "layout": self.layout.fingerprint,
            "weights": self._weights,
            "cuts": [
                [0, *(chunk.stop for chunk in self._chunks.all if chunk.block == block)]
                for block in range(len(self.layout.blocks))
            ],
            "states": [dict(self._chunks.state(chunk)) for chunk in self._chunks.all],
            "options": self._chunks.options(),
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue from a state of any chunk size. Its optimizer state becomes the shard's own.

        Raises:
            ConfigError: It belongs to a shard with other parameters.
        """
        if state["layout"] != self.layout.fingerprint:
            raise ConfigError("the snapshot is of other parameters than this shard's: resume with the same model")
        chunks = Chunks(self.layout, self._weights, self._updates, cast("list[list[int]]", state["cuts"]))
        chunks.load(cast("list[State]", state["states"]))
        chunks.set_options(cast("list[Options]", state["options"]))
        self.initialise(cast("torch.Tensor", state["weights"]))
        self._chunks = chunks

    def _counted(self, gradients: Gradients) -> _Counted:
        return [
            (message if isinstance(message, list) else flat_views(self.layout, message), weight)
            for message, weight in gradients
            if weight
        ]

    def _batches(self, uses: int = 1) -> Iterator[list[Chunk]]:
        """Neighbouring chunks that fit into the scratch memory together, with `uses` wide copies of each."""
        room = max(_scratch_bytes(chunk, uses) for chunk in self._chunks.all)
        if self._scratch.numel() < room:
            self._scratch = torch.empty(room, dtype=torch.uint8)
        batch: list[Chunk] = []
        left = room
        for chunk in self._chunks.all:
            if _scratch_bytes(chunk, uses) > left:
                yield batch
                batch, left = [], room
            batch.append(chunk)
            left -= _scratch_bytes(chunk, uses)
        yield batch

    def _sums(
        self,
        chunks: Sequence[Chunk],
        messages: _Counted,
        factors: Sequence[float] = (),
        makes_up: "_MakesUp | None" = None,
    ) -> list[torch.Tensor]:
        """The weighted sums of the messages over these chunks, times the factors of their groups, in scratch memory."""
        sums: list[torch.Tensor] = []
        used = 0
        for chunk in chunks:
            dtype = chunk.weights.dtype
            total, used = self._room(chunk, wide(dtype), used)
            group = self.layout.blocks[chunk.block].group
            factor = factors[group] if factors else 1.0
            add_up([(chunk.of(flats), weight * factor) for flats, weight in messages], total)
            if makes_up is not None and makes_up.compensation[group]:
                moved, used = self._room(chunk, wide(dtype), used)
                size, used = self._room(chunk, wide(dtype), used)
                torch.sub(chunk.weights, chunk.of(makes_up.stale), out=moved)
                torch.abs(total, out=size)
                total.addcmul_(size, moved, value=makes_up.compensation[group])
            if total.dtype != dtype:
                rounded, used = self._room(chunk, dtype, used)
                total = rounded.copy_(total)
            sums.append(total)
        return sums

    def _move(self, chunks: Sequence[Chunk], sums: Sequence[torch.Tensor], direct: Sequence[float]) -> None:
        """Move the weights of these chunks by their sums, times -`direct` of their groups."""
        for chunk, total in zip(chunks, sums, strict=True):
            chunk.weights.add_(total, alpha=-direct[self.layout.blocks[chunk.block].group])

    def _room(self, chunk: Chunk, dtype: torch.dtype, used: int) -> tuple[torch.Tensor, int]:
        """Scratch memory for a chunk from byte `used` on, and the new value of `used`."""
        nbytes = (chunk.stop - chunk.start) * dtype.itemsize
        return self._scratch[used : used + nbytes].view(dtype), used + aligned(nbytes)


def _scratch_bytes(chunk: Chunk, uses: int) -> int:
    """The scratch bytes of a chunk: `uses` wide copies, and a sum in the dtype of the weights if that is narrower."""
    elements, dtype = chunk.stop - chunk.start, chunk.weights.dtype
    summed = wide(dtype)
    return uses * aligned(elements * summed.itemsize) + (0 if summed == dtype else aligned(elements * dtype.itemsize))


def _squares(part: torch.Tensor) -> float:
    norm = norm_of(part)
    return norm * norm
