"""A worker's weights and gradients as NumPy arrays, in the messages that travel to and from the servers."""

import math
from collections.abc import Sequence
from typing import Any, Final, TypeAlias, final

import numpy as np
import numpy.typing as npt

from evenstep.core.errors import ConfigError
from evenstep.core.shown import shown
from evenstep.protocol.layout import DTYPE_BYTES, Layout, ParameterSpec, ShardLayout
from evenstep.worker.servers.link import ServerLink

Array: TypeAlias = npt.NDArray[Any]

_PIECE_ELEMENTS: Final = 2**20
"""Norms are computed in float64 from pieces of this size, to save memory."""


def layout_of(weights: Sequence[Array]) -> Layout:
    """Lay out the weights for the servers, which know them by their numbers.

    Raises:
        ConfigError: There are none, or one is not an array that a message can carry.
    """
    if not isinstance(weights, list | tuple):
        raise ConfigError(f"weights takes a list of numpy arrays, not {shown(weights)}")
    if not weights:
        raise ConfigError("there are no weights to train: give weights= a list of arrays")
    return Layout(parameters=tuple(_spec(number, each) for number, each in enumerate(weights)), groups=1)


def _spec(number: int, weight: object) -> ParameterSpec:
    if not isinstance(weight, np.ndarray):
        raise ConfigError(f"weight {number} is {shown(weight)}: give a list of numpy arrays")
    if weight.dtype.name not in DTYPE_BYTES:
        raise ConfigError(f"weight {number} is {weight.dtype.name}: servers train float16, float32 and float64")
    return ParameterSpec(name=str(number), shape=weight.shape, dtype=weight.dtype.name, group=0)


@final
class ArrayParameters:
    """The weights, and the messages of weights and gradients of every shard.

    Args:
        weights: The initial weights, which are copied.
        layouts: The parameters of each shard, and their places.
        link: Holds the messages.

    Attributes:
        taken: How often weights have arrived.
    """

    def __init__(self, weights: Sequence[Array], layouts: Sequence[ShardLayout], link: ServerLink) -> None:
        self.taken = 0
        self._own = [np.array(each) for each in weights]
        self._order = [[int(each.name) for each in layout.parameters] for layout in layouts]
        self._layouts = layouts
        self._link = link
        self._viewed = -1
        self._gradients: list[Array] = []
        self._weights: list[Array] = []

    @property
    def weights(self) -> list[Array]:
        """The current weights, read-only; newer ones arrive in the same memory."""
        views = [each.view() for each in self._own]
        for each in views:
            each.flags.writeable = False
        return views

    def view(self) -> None:
        """Use the link's messages, which are different in each new place."""
        if self._viewed == self._link.incarnation:
            return
        shards = list(zip(self._layouts, self._link.shards, strict=True))
        self._gradients = self._by_number([_views(layout, shard.gradients) for layout, shard in shards])
        self._weights = self._by_number([_views(layout, shard.weights) for layout, shard in shards])
        self._viewed = self._link.incarnation

    def _by_number(self, shards: Sequence[Sequence[Array]]) -> list[Array]:
        found = {
            number: view
            for order, views in zip(self._order, shards, strict=True)
            for number, view in zip(order, views, strict=True)
        }
        return [found[number] for number in range(len(found))]

    def put_weights(self) -> None:
        """Put the weights into the messages of gradients, to start a run from them."""
        self.view()
        self._copy(self._own, self._gradients)

    def take_weights(self) -> None:
        """Put the weights that have arrived into the arrays."""
        self.taken += 1
        self._copy(self._weights, self._own)

    def put_gradients(self, gradients: Sequence[Array]) -> float:
        """Make the gradients ready to be sent, and return their norm, which is finite only if all gradients are.

        Raises:
            ConfigError: They do not have the shapes of the weights, or are not real numbers.
        """
        self.view()
        try:
            given = [np.asarray(each) for each in gradients]
        except (TypeError, ValueError):
            raise ConfigError(
                f"push takes a list of arrays, a gradient of each weight, not {shown(gradients)}"
            ) from None
        shapes, needed = [each.shape for each in given], [each.shape for each in self._own]
        if shapes != needed:
            raise ConfigError(f"push takes a gradient of each weight, of the shapes {needed}, not {shapes}")
        for number, (gradient, weight) in enumerate(zip(given, self._own, strict=True)):
            if not np.can_cast(gradient.dtype, weight.dtype, "same_kind"):
                raise ConfigError(f"the gradient of weight {number} is {gradient.dtype}: push takes real numbers")
        self._copy(given, self._gradients)
        return math.hypot(*(_norm(each.ravel()) for each in self._gradients))

    def finite(self) -> bool:
        """True if no weight holds a NaN or an infinity."""
        return all(bool(np.isfinite(each).all()) for each in self._own)

    @staticmethod
    def _copy(sources: Sequence[Array], targets: Sequence[Array]) -> None:
        for source, target in zip(sources, targets, strict=True):
            np.copyto(target, source, casting="same_kind")


def _views(layout: ShardLayout, message: npt.NDArray[np.uint8]) -> list[Array]:
    """View each parameter in a message, in the order of `layout.parameters`."""
    views: list[Array] = []
    for block in layout.blocks:
        begin = block.offset
        for spec in block.parameters:
            views.append(message[begin : begin + spec.nbytes].view(block.dtype).reshape(spec.shape))
            begin += spec.nbytes
    return views


def _norm(flat: Array) -> float:
    pieces = (flat[start : start + _PIECE_ELEMENTS] for start in range(0, flat.size, _PIECE_ELEMENTS))
    return math.hypot(*(float(np.linalg.norm(each.astype(np.float64))) for each in pieces))
