"""Sums gradients over the workers of a group on one host, by a collective, so that one of them pushes for all.

The process group is made of those whom the group's server names, has nothing to do with the script's own, and is thrown
away with the first failure: then the server names others.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast, final

import torch

from evenstep.launch.c10d import PrefixStore, TCPStore, gloo_backend
from evenstep.launch.loopback import LOOPBACK
from evenstep.server.shard.sums import wide
from evenstep.transport.base import Header


@final
class SumFailedError(Exception):
    """Another worker of the group is gone, or was silent for too long; what this one's gradients hold is undefined."""


@final
class GroupSum:
    """One worker's part in the sums of its group; use by one thread."""

    def __init__(self) -> None:
        self._made: tuple[object, object] | None = None
        self._ring: Any = None

    @torch.no_grad()
    def add_up(self, told: Header, gradients: Sequence[torch.Tensor]) -> bool:
        """The weighted sum of all workers' gradients, which the first of them has in place of its own.

        Args:
            told: The group server's answer to an offer: `ring`, `place` in it, how many `workers`, `weight`, `store`,
                and for how many `seconds` the others may be silent.
            gradients: Rows in host memory, alike on each worker. They are overwritten.

        Returns: Whether this worker is the first. Sums are taken in float32 where gradients are narrower.

        Raises:
            SumFailedError: Somebody did not take part to the end.
        """
        place, weight = int(cast("int", told["place"])), float(cast("float", told["weight"]))
        try:
            ring = self._joined(told, place)
            for own in gradients:
                summed = own.to(wide(own.dtype)).mul_(weight) if wide(own.dtype) != own.dtype else own.mul_(weight)
                ring.reduce(summed, 0).wait()
                if summed is not own and not place:
                    own.copy_(summed)
        except RuntimeError as error:  # Of c10d, which names neither the worker nor the cause by type.
            # Nothing must keep its connections, at whose end the others notice: neither this frame nor the error's.
            self._made = self._ring = ring = None
            raise SumFailedError(str(error)) from None
        return not place

    def _joined(self, told: Header, place: int) -> Any:
        made = (told["store"], told["ring"])
        if self._ring is None or self._made != made:
            self._ring = None
            port, count = int(cast("int", told["store"])), int(cast("int", told["workers"]))
            patience = timedelta(seconds=float(cast("float", told["seconds"])))
            store = PrefixStore(str(told["ring"]), TCPStore(LOOPBACK, port, is_master=False, timeout=patience))
            self._ring = _backend(store, place, count, patience)
            self._made = made
        return self._ring


def _backend(store: PrefixStore, place: int, count: int, timeout: timedelta) -> Any:
    gloo = gloo_backend._Options()
    # Which names of this host the network knows does not matter.
    gloo._devices = [gloo_backend.create_device(hostname=LOOPBACK)]
    gloo._timeout = timeout
    return gloo_backend(store, place, count, gloo)
