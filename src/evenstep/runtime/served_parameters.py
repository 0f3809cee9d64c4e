"""A worker's parameters and gradients as what travels to and from the servers."""

from collections.abc import Sequence
from typing import final

import torch

from evenstep.runtime.link import Link
from evenstep.runtime.server.layout import ShardLayout, gather, scatter
from evenstep.runtime.tensor_memory import memory_of


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
        self._gradients: list[list[torch.Tensor]] = []
        self._weights: list[list[torch.Tensor]] = []
        self._viewed = -1
        self._left: int | None = None
        """What the parameters' versions added up to when weights were taken last."""

    def view(self) -> None:
        """Use the link's messages; anew where the worker has taken a new place."""
        if self._viewed == self._link.incarnation:
            return
        shards = list(zip(self._layouts, self._link.shards, strict=True))
        self._gradients = [layout.views(shard.gradients) for layout, shard in shards]
        self._weights = [_own_views(layout, shard.weights) for layout, shard in shards]
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
            scatter([parameter.detach() for parameter in parameters], gradients)

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

    def put_gradients(self) -> float:
        """The gradients are ready to be sent; their norm, which is not finite where one of them is not."""
        self.view()
        total = 0.0
        for layout, shard, parameters, views in zip(
            self._layouts, self._link.shards, self._parameters, self._gradients, strict=True
        ):
            shard.payload = self._in_place(layout, parameters) if self._waits and shard.segment is None else None
            if shard.payload is None:
                gather(parameters, views)
                sent: Sequence[torch.Tensor] = views
            else:
                sent = [parameter.grad for parameter in parameters if parameter.grad is not None]
            # No narrower than the gradients, and wide enough for those in half precision.
            wide = max((each.dtype for each in sent), key=lambda each: each.itemsize, default=torch.float32)
            dtype = wide if wide.itemsize > torch.float32.itemsize else torch.float32
            norms = torch._foreach_norm([each for each in sent if each.numel()], 2, dtype=dtype)
            total += float(torch.stack(list(norms)).double().square().sum())
        return float(total**0.5)

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
                if gradient is None or gradient.dtype != block.dtype or not _lies_plain(gradient):
                    return None
                if gradient.numel():
                    pieces.append(memory_of(gradient.detach().view(-1).view(torch.uint8)))
            end = block.end
        if layout.nbytes > end:
            pieces.append(memoryview(bytes(layout.nbytes - end)))
        return pieces


def _lies_plain(gradient: torch.Tensor) -> bool:
    return gradient.layout == torch.strided and gradient.device.type == "cpu" and gradient.is_contiguous()


def _own_views(layout: ShardLayout, message: torch.Tensor) -> list[torch.Tensor]:
    """A view of each parameter in a message whose storage is that parameter alone.

    A model is saved by its storages: parameters that shared one would bring the whole message into every file, and
    could not be saved at all where they are of several dtypes.
    """
    memory = layout.message(message).numpy()
    views: list[torch.Tensor] = []
    for block in layout.blocks:
        begin = block.offset
        for spec in block.parameters:
            end = begin + spec.nbytes
            views.append(torch.from_numpy(memory[begin:end]).view(block.dtype).view(spec.shape))
            begin = end
    return views
