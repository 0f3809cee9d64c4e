"""The processes of `jax.distributed`: what they exchange, and which of them is gone when an exchange fails."""

import threading
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar, final

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import distributed  # The store of jax.distributed has no public name; Orbax takes it from here, too.
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from evenstep.core.errors import ConfigError, WorkerLostError
from evenstep.core.workers import name_workers

Tree = TypeVar("Tree")

PULSE_SECONDS: Final = 0.5
SILENT_SECONDS: Final = 10.0
"""After a failure a worker whose pulse stands still for so long is lost."""
_AXIS: Final = "workers"
_APART, _ALIKE = PartitionSpec(_AXIS), PartitionSpec()


@final
class Processes:
    """All processes of `jax.distributed`; each is a worker, and all must make the same calls.

    Only the first device of each process takes part in an exchange.
    """

    def __init__(self) -> None:
        self.rank, self.count = jax.process_index(), jax.process_count()
        first = {each.process_index: each for each in reversed(jax.devices())}
        self._device = first[self.rank]
        mesh = Mesh(np.array([first[rank] for rank in range(self.count)]), (_AXIS,))
        self._apart = NamedSharding(mesh, _APART)
        self._gathered = jax.jit(lambda rows: rows, out_shardings=NamedSharding(mesh, _ALIKE))
        self._summed = jax.jit(jax.shard_map(_weighted, mesh=mesh, in_specs=_APART, out_specs=_ALIKE))
        self._pulse = Pulse(self.rank, self.count) if self.count > 1 else None

    def all_gather(self, row: bytes) -> list[bytes]:
        """The rows of all workers, by rank; within a call all have the same length.

        Raises:
            WorkerLostError: A worker is gone.
        """
        if self.count == 1:
            return [row]
        return [each.tobytes() for each in np.asarray(self._together(self._gathered, np.frombuffer(row, np.uint8)))]

    def mean(self, tree: Tree, weight: float) -> Tree:
        """The arrays of all workers, times the `weight` of each worker, added up; the arrays stay where they were.

        They are multiplied and added up as float32, or in their own precision if that is higher.

        Raises:
            ConfigError: An array is not of floating-point numbers.
            WorkerLostError: A worker is gone.
        """
        leaves, form = jax.tree.flatten(tree)
        for each in leaves:
            if not jnp.issubdtype(jnp.result_type(each), jnp.inexact):
                raise ConfigError(
                    f"a mean over workers is of floating-point numbers, not of {jnp.result_type(each)}: leave other"
                    " arrays out"
                )
        if self.count == 1 or not leaves:
            return tree
        if weight == 0:  # A copy of another worker's sample: 0 times NaN would be NaN.
            leaves = [jnp.zeros_like(each) for each in leaves]
        sums = self._together(self._summed, leaves, np.asarray(weight))
        back = [
            jax.device_put(new, old.sharding) if isinstance(old, jax.Array) else new
            for new, old in zip(sums, leaves, strict=True)
        ]
        return jax.tree.unflatten(form, back)

    def _together(self, function: Callable[..., Any], *trees: Any) -> Any:
        """The function of every array of all workers, stacked by rank; what it returns is the same on all of them."""
        try:
            together = function(*jax.tree.map(self._stacked, trees))
            return jax.block_until_ready(jax.tree.map(lambda each: each.addressable_data(0), together))
        except (ValueError, RuntimeError) as error:  # jaxlib raises the errors of Gloo as either.
            lost = self._pulse.silent() if self._pulse is not None else None
            if not lost:
                raise
            raise WorkerLostError(f"{name_workers(lost)} is gone: {_first_line(error)}") from error

    def _stacked(self, own: Any) -> Any:
        """This worker's array as its row of an array over all workers."""
        row = jax.device_put(own, self._device)[None]
        return jax.make_array_from_single_device_arrays((self.count, *row.shape[1:]), self._apart, [row])


def _weighted(leaves: list[Any], weight: Any) -> list[Any]:
    """The weighted sum over the mesh of each array; every one has a first axis of 1 here."""

    def summed(leaf: Any) -> Any:
        wide = jnp.promote_types(leaf.dtype, jnp.float32)
        return jax.lax.psum(leaf[0].astype(wide) * weight[0].astype(wide), _AXIS).astype(leaf.dtype)

    return [summed(leaf) for leaf in leaves]


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


@final
class Pulse:
    """Counts in the store of `jax.distributed`, in a thread, so that the others see that this process is alive."""

    def __init__(self, rank: int, count: int) -> None:
        self._others = [each for each in range(count) if each != rank]
        self._store = distributed.global_state.client
        self._key = f"evenstep/pulse/{rank}"
        self._beat(0)
        threading.Thread(target=self._beat_on, name="evenstep pulse", daemon=True).start()

    def _beat(self, number: int) -> None:
        self._store.key_value_set(self._key, str(number), allow_overwrite=True)

    def _beat_on(self) -> None:
        number = 0
        while True:
            time.sleep(PULSE_SECONDS)
            number += 1
            try:
                self._beat(number)
            except RuntimeError:  # JAX's: the run is over, or worker 0 is gone, which holds the store.
                return

    def silent(self) -> list[int]:
        """The other workers whose pulse stands still for a while; worker 0 alone if its store cannot be reached."""
        deadline = time.monotonic() + SILENT_SECONDS
        try:
            first = {rank: self._read(rank) for rank in self._others}
            waiting = set(self._others)
            while waiting and time.monotonic() < deadline:
                time.sleep(PULSE_SECONDS)
                waiting = {rank for rank in waiting if self._read(rank) == first[rank]}
        except RuntimeError:  # JAX's: the store does not answer.
            return [0]
        return sorted(waiting)

    def _read(self, rank: int) -> str:
        read: str = self._store.blocking_key_value_get(f"evenstep/pulse/{rank}", round(SILENT_SECONDS * 1000))
        return read
