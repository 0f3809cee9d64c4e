"""A worker's parameters and gradients in the messages to and from the servers."""

import math
import warnings
from collections.abc import Sequence
from typing import Final, final

import torch

from evenstep.protocol.layout import ShardLayout
from evenstep.schemes.scheme import Wire
from evenstep.tensors.messages import (
    DTYPES,
    all_finite,
    as_bytes,
    as_message,
    flat_views,
    gather,
    memory_of,
    norm_of,
    parameter_views,
    scatter,
)
from evenstep.tensors.narrow import NarrowMessages
from evenstep.worker.servers.link import ServerLink

_PIECE_ELEMENTS: Final = 2**20
"""Norms are computed in pieces of this size, in which float32 sums lose no significant digits."""


@final
class ServedParameters:
    """The trained parameters, shard by shard, and the messages of their weights and gradients.

    On one host an exchange consists of copies, and two kinds are avoided: parameters that may change as soon as weights
    arrive live in the message of weights itself, and gradients that go over a socket are sent from where they are.

    Args:
        parameters: The parameters by name.
        layouts: Which parameters each shard holds, and where.
        link: Holds the messages.
        waits: The worker does nothing between a push and its answer, so both copies can be avoided.
        local: The worker changes its weights between two pushes. It keeps those that it took in the message.
        wire: The format in which gradients and changes travel. What rounding leaves out is added to the next ones of
            this place; what was left out in a former place is lost.
    """

    def __init__(
        self,
        parameters: dict[str, torch.nn.Parameter],
        layouts: Sequence[ShardLayout],
        link: ServerLink,
        *,
        waits: bool,
        local: bool = False,
        wire: Wire = "float32",
    ) -> None:
        self._parameters = [[parameters[each.name] for each in layout.parameters] for layout in layouts]
        self._layouts = layouts
        self._link = link
        self._waits = waits and not local and wire == "float32"
        self._local = local
        self._narrow: list[NarrowMessages] = []
        self._left: list[torch.Tensor | None] = []
        """The rests that rounding has left out of the pushes so far, by shard."""
        if wire != "float32":
            self._narrow = [NarrowMessages(layout, wire) for layout in layouts]
            for shard, narrow in zip(link.shards, self._narrow, strict=True):
                shard.narrow_bytes = narrow.nbytes
        self._gradients: list[_Message] = []
        self._all = [each for parameters in self._parameters for each in parameters]
        self._ids = frozenset(map(id, self._all))
        self._weights: list[tuple[torch.nn.Parameter, torch.Tensor, int]] = []
        """Each parameter, its view in the message of weights, and the address of that."""
        self._viewed = -1
        self._warned = False
        self._taken: int | None = None
        """The sum of the parameters' version counters when weights were last taken."""

    def has(self, parameter: torch.Tensor) -> bool:
        """True if the servers have this parameter."""
        return id(parameter) in self._ids

    def view(self) -> None:
        """Use the link's messages, which change when this worker joins anew."""
        if self._viewed == self._link.incarnation:
            return
        shards = list(zip(self._layouts, self._link.shards, strict=True))
        self._gradients = [_Message(layout, torch.from_numpy(shard.gradients)) for layout, shard in shards]
        views = [each for layout, shard in shards for each in _own_views(layout, torch.from_numpy(shard.weights))]
        self._weights = [(*both, both[1].data_ptr()) for both in zip(self._all, views, strict=True)]
        if self._waits:
            for parameter, weight, _ in self._weights:
                if parameter.device.type == "cpu" and parameter.is_contiguous() and parameter.numel():
                    weight.copy_(parameter.detach())
                    parameter.data = weight
        self._viewed, self._left = self._link.incarnation, [None for _ in shards]

    def put_weights(self) -> None:
        """Put the weights into the messages of gradients, to start a run with them."""
        self.view()
        for shard, parameters, gradients in zip(self._link.shards, self._parameters, self._gradients, strict=True):
            shard.payload = None
            scatter([parameter.detach() for parameter in parameters], gradients.views)

    def take_weights(self) -> None:
        """Copy the weights that have arrived into the parameters."""
        for shard, narrow in zip(self._link.shards, self._narrow, strict=False):
            for difference in shard.differences:
                narrow.add(as_bytes(memoryview(difference)), torch.from_numpy(shard.weights))
            shard.differences.clear()
        elsewhere = [(weight, each) for each, weight, place in self._weights if each.data_ptr() != place]
        if elsewhere:
            scatter(*zip(*elsewhere, strict=True))
        if self._local:
            self._link.has = -1  # The next answer has to come with weights, since steps will change these.
        self._taken = self._versions()

    def drop_changes(self) -> None:
        """Let the servers' weights replace what the script wrote since weights were taken, with a warning."""
        before = self._taken
        self._taken = None if before is None else self._versions()
        if before == self._taken:
            return
        self._link.has = -1  # The servers then send weights even if theirs have not changed.
        if not self._warned:
            self._warned = True
            warnings.warn(
                "the model's weights were changed between steps, but under parameter servers they are replaced by the"
                " servers' at the next step: load weights before prepare, or go on from snapshots with evenstep run"
                " --resume",
                stacklevel=2,
            )

    def _versions(self) -> int:
        # Version counters only grow. They do not count the servers' writes into shared memory.
        return sum([parameter._version for parameter in self._all])

    def drop_gradients(self) -> None:
        """Drop all gradients."""
        for parameter in self._all:
            parameter.grad = None

    def finite(self) -> bool:
        """True if no parameter holds a NaN or an infinity, or if the servers' weights replace them."""
        return self._local or all_finite(self._all)

    def put_gradients(self) -> float:
        """Prepare the gradients for sending, and return their norm, which is finite only if all gradients are."""
        self.view()
        norms: list[float] = []
        with torch.no_grad():
            for layout, shard, parameters, gradients in zip(
                self._layouts, self._link.shards, self._parameters, self._gradients, strict=True
            ):
                in_place = self._waits and not shard.shared
                shard.payload = _in_place(layout, parameters) if in_place else None
                if shard.payload is None:
                    norms += gradients.gather(parameters)
                else:
                    norms += _norms([each.grad for each in parameters if each.grad is not None and each.numel()])
        return self._rounded() if self._narrow else math.hypot(*norms)

    @torch.no_grad()
    def put_changes(self) -> float:
        """Prepare for sending what takes the weights that were taken to the present ones, subtracted; its norm.

        The norm is finite only if all changes are.
        """
        taken = iter(self._weights)
        norms: list[float] = []
        for shard, gradients in zip(self._link.shards, self._gradients, strict=True):
            shard.payload = None
            for change, (parameter, weights, _) in zip(gradients.views, taken, strict=False):
                change.copy_(parameter)
                torch.sub(weights, change, out=change)
            norms += gradients.norms()
        return self._rounded() if self._narrow else math.hypot(*norms)

    def _rounded(self) -> float:
        """Round the messages of gradients for a narrow wire; their norm."""
        left: list[torch.Tensor | None] = []
        for narrow, shard, before in zip(self._narrow, self._link.shards, self._left, strict=True):
            packed, rest = narrow.round(torch.from_numpy(shard.gradients), before)
            shard.payload = [memory_of(packed)]
            left.append(rest)
        norm = math.hypot(*(norm for gradients in self._gradients for norm in gradients.norms()))
        if math.isfinite(norm):  # Others are not pushed.
            self._left = left
        return norm


def _in_place(layout: ShardLayout, parameters: Sequence[torch.nn.Parameter]) -> list[memoryview] | None:
    """The message as pieces of the gradients' own memory; None if a gradient's layout differs from the message's."""
    gradients = {spec.name: parameter.grad for spec, parameter in zip(layout.parameters, parameters, strict=True)}
    pieces: list[memoryview] = []
    end = 0
    for block in layout.blocks:
        if block.offset > end:
            pieces.append(memoryview(bytes(block.offset - end)))
        for spec in block.parameters:
            gradient = gradients[spec.name]
            if gradient is None or gradient.dtype != DTYPES[block.dtype] or not _lies_plain(gradient):
                return None
            if gradient.numel():
                pieces.append(_memory_of(gradient.detach()))
        end = block.end
    if layout.nbytes > end:
        pieces.append(memoryview(bytes(layout.nbytes - end)))
    return pieces


@final
class _Message:
    """A message of gradients, filled by whole blocks where possible, because models have many small tensors."""

    def __init__(self, layout: ShardLayout, message: torch.Tensor) -> None:
        self.views = parameter_views(layout, message)
        self._blocks: list[tuple[slice, torch.Tensor, Sequence[torch.Tensor]]] = []
        """The parameters of each block, its place in the message, and the pieces of that place."""
        first = 0
        for block, flat in zip(layout.blocks, flat_views(layout, message), strict=True):
            beyond = first + len(block.parameters)
            self._blocks.append((slice(first, beyond), flat, torch.split(flat, _PIECE_ELEMENTS)))
            first = beyond

    def gather(self, parameters: Sequence[torch.Tensor]) -> list[float]:
        """Copy the gradients into the message, with zeros for missing ones; returns the norms of its pieces."""
        for own, flat, _ in self._blocks:
            gradients = [parameter.grad for parameter in parameters[own]]
            dtype = flat.dtype
            plain = [
                each.view(-1) for each in gradients if each is not None and each.dtype is dtype and _lies_plain(each)
            ]
            if len(plain) == len(gradients):
                torch.cat(plain, out=flat)
            else:
                gather(parameters[own], self.views[own])
        return self.norms()

    def norms(self) -> list[float]:
        """Return the norms of its pieces."""
        return [norm_of(piece) for _, _, pieces in self._blocks for piece in pieces]


def _norms(tensors: list[torch.Tensor]) -> list[float]:
    """The norm of each tensor, in the widest dtype of all, at least float32."""
    if not tensors:
        return []
    widest = max({each.dtype for each in tensors} | {torch.float32}, key=lambda dtype: dtype.itemsize)
    norms = [norm.item() for norm in torch._foreach_norm(tensors, 2, dtype=widest)]
    if all(map(math.isfinite, norms)):
        return norms
    # Only the squares may be too large.
    return [norm_of(each.view(-1)) for each in tensors]


def _lies_plain(gradient: torch.Tensor) -> bool:
    return gradient.layout is torch.strided and gradient.is_cpu and gradient.is_contiguous()


def _memory_of(gradient: torch.Tensor) -> memoryview:
    """The gradient's memory; NumPy does not know bfloat16."""
    return memory_of(gradient.view(-1).view(torch.uint8) if gradient.dtype == torch.bfloat16 else gradient)


def _own_views(layout: ShardLayout, message: torch.Tensor) -> list[torch.Tensor]:
    """A view of each parameter in a message, each with a separate storage.

    A model is saved by its storages. Parameters that share one would put the whole message into every file, and could
    not be saved at all if their dtypes differ.
    """
    memory = as_message(layout, message).numpy()
    views: list[torch.Tensor] = []
    for block in layout.blocks:
        begin = block.offset
        for spec in block.parameters:
            end = begin + spec.nbytes
            views.append(torch.from_numpy(memory[begin:end]).view(DTYPES[block.dtype]).view(spec.shape))
            begin = end
    return views
