"""A worker's parameters and gradients as what travels to and from the servers."""

import math
from collections.abc import Sequence
from typing import Final, final

import torch

from evenstep.protocol.layout import ShardLayout
from evenstep.tensors.memory import memory_of
from evenstep.tensors.messages import (
    DTYPES,
    all_finite,
    as_message,
    flat_views,
    gather,
    norm_of,
    parameter_views,
    scatter,
)
from evenstep.worker.servers.link import Link

_PIECE_ELEMENTS: Final = 2**20
"""What is measured at once: float32 loses no digits that count in adding it up."""


@final
class ServedParameters:
    """The trained parameters, shard by shard, beside the messages that they come from and their gradients go into.

    Copies are what an exchange on one host consists of, so those that can be spared are: parameters that may change as
    soon as weights arrive live in the message of weights itself, and gradients that travel over a socket are sent from
    where they are.

    Args:
        parameters: By name.
        layouts: What lies on which shard, and where.
        link: Its messages are used.
        waits: The worker does nothing between a push and its answer, so weights may come straight into the parameters,
            and gradients stay as they are until they have been sent.
    """

    def __init__(
        self, parameters: dict[str, torch.nn.Parameter], layouts: Sequence[ShardLayout], link: Link, *, waits: bool
    ) -> None:
        self._parameters = [[parameters[each.name] for each in layout.parameters] for layout in layouts]
        self._layouts = layouts
        self._link = link
        self._waits = waits
        self._gradients: list[_Message] = []
        self._weights: list[list[torch.Tensor]] = []
        self._viewed = -1
        self._left: int | None = None
        """What the parameters' versions added up to when weights were taken last."""

    def view(self) -> None:
        """Use the link's messages; anew where the worker has taken a new place."""
        if self._viewed == self._link.incarnation:
            return
        shards = list(zip(self._layouts, self._link.shards, strict=True))
        self._gradients = [_Message(layout, torch.from_numpy(shard.gradients)) for layout, shard in shards]
        self._weights = [_own_views(layout, torch.from_numpy(shard.weights)) for layout, shard in shards]
        if self._waits:
            for parameters, weights in zip(self._parameters, self._weights, strict=True):
                for parameter, weight in zip(parameters, weights, strict=True):
                    if parameter.device.type == "cpu" and parameter.is_contiguous() and parameter.numel():
                        weight.copy_(parameter.detach())
                        parameter.data = weight
        self._viewed = self._link.incarnation

    def put_weights(self) -> None:
        """The weights go where gradients go, to be what a run begins with."""
        self.view()
        for shard, parameters, gradients in zip(self._link.shards, self._parameters, self._gradients, strict=True):
            shard.payload = None
            scatter([parameter.detach() for parameter in parameters], gradients.views)

    def take_weights(self) -> None:
        """The weights that have come become the parameters'."""
        for parameters, weights in zip(self._parameters, self._weights, strict=True):
            elsewhere = [
                (weight, parameter)
                for weight, parameter in zip(weights, parameters, strict=True)
                if parameter.data_ptr() != weight.data_ptr()
            ]
            if elsewhere:
                scatter(*zip(*elsewhere, strict=True))
        self._left = self._versions()

    def changed(self) -> bool:
        """Whether the script has written into parameters since weights were taken last; said once for each time."""
        if self._left is None or self._left == self._versions():
            return False
        self._left = self._versions()
        return True

    def _versions(self) -> int:
        # They only grow. What the servers write into shared memory counts nowhere.
        return sum(parameter._version for parameters in self._parameters for parameter in parameters)

    def finite(self) -> bool:
        """Whether no parameter holds a NaN or an infinity."""
        return all(all_finite(each) for parameters in self._parameters for each in parameters)

    def put_gradients(self) -> float:
        """The gradients are ready to be sent; their norm, which is not finite where one of them is not."""
        self.view()
        norms: list[float] = []
        for layout, shard, parameters, gradients in zip(
            self._layouts, self._link.shards, self._parameters, self._gradients, strict=True
        ):
            in_place = self._waits and shard.segment is None
            shard.payload = self._in_place(layout, parameters) if in_place else None
            if shard.payload is None:
                norms += gradients.gather(parameters)
            else:
                norms += _norms([each.grad for each in parameters if each.grad is not None and each.numel()])
        return math.hypot(*norms)

    def _in_place(self, layout: ShardLayout, parameters: Sequence[torch.nn.Parameter]) -> list[memoryview] | None:
        """The message in pieces of the gradients' own memory; None where they do not lie as it does."""
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
    """A message of gradients: a view of each parameter in it, and its blocks.

    A model has many small tensors, and whatever is done with one takes microseconds before it begins: what can be done
    with a whole block is.
    """

    def __init__(self, layout: ShardLayout, message: torch.Tensor) -> None:
        self.views = parameter_views(layout, message)
        self._blocks: list[tuple[slice, torch.Tensor]] = []
        first = 0
        for block, flat in zip(layout.blocks, flat_views(layout, message), strict=True):
            beyond = first + len(block.parameters)
            self._blocks.append((slice(first, beyond), flat))
            first = beyond

    @torch.no_grad()
    def gather(self, parameters: Sequence[torch.Tensor]) -> list[float]:
        """Copy the gradients into the message, zeros where there is none; norms of its pieces."""
        norms: list[float] = []
        for own, flat in self._blocks:
            gradients = [parameter.grad for parameter in parameters[own]]
            plain = [
                each.view(-1)
                for each in gradients
                if each is not None and each.dtype == flat.dtype and _lies_plain(each)
            ]
            if len(plain) == len(gradients):
                torch.cat(plain, out=flat)
            else:
                gather(parameters[own], self.views[own])
            norms += [norm_of(piece) for piece in torch.split(flat, _PIECE_ELEMENTS)]
        return norms


def _norms(tensors: list[torch.Tensor]) -> list[float]:
    """Of each, no narrower than they are, and wide enough for half precision."""
    if not tensors:
        return []
    widest = max({each.dtype for each in tensors} | {torch.float32}, key=lambda dtype: dtype.itemsize)
    norms = [norm.item() for norm in torch._foreach_norm(tensors, 2, dtype=widest)]
    if all(map(math.isfinite, norms)):
        return norms
    # Perhaps only their squares are too large.
    return [norm_of(each.view(-1)) for each in tensors]


def _lies_plain(gradient: torch.Tensor) -> bool:
    return gradient.layout == torch.strided and gradient.device.type == "cpu" and gradient.is_contiguous()


def _memory_of(gradient: torch.Tensor) -> memoryview:
    """Its memory, also of a dtype that NumPy does not know."""
    return memory_of(gradient.view(-1).view(torch.uint8) if gradient.dtype == torch.bfloat16 else gradient)


def _own_views(layout: ShardLayout, message: torch.Tensor) -> list[torch.Tensor]:
    """A view of each parameter in a message whose storage is that parameter alone.

    A model is saved by its storages: parameters that shared one would bring the whole message into every file, and
    could not be saved at all where they are of several dtypes.
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
