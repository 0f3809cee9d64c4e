"""The processes of `jax.distributed`: their exchanges, and the missing process when an exchange fails."""

import atexit
import os
import zlib
from collections.abc import Callable
from threading import Thread
from typing import Any, Final, TypeVar, final

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import distributed  # There is no public way to the coordinator's address.
from jax._src.api import clean_up
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from evenstep.core.errors import ConfigError
from evenstep.core.shown import shown
from evenstep.launch.launch_settings import LaunchSettings
from evenstep.launch.marks import leave_mark
from evenstep.worker.api.row_exchange import RowExchange

Tree = TypeVar("Tree")

_MAX_JOINED: Final = 2**18
"""The most elements of an array that is joined with others for an exchange."""
_LEAVE_SECONDS: Final = 3.0
"""The time to wait for the other workers at exit if one of them is lost."""
_AXIS: Final = "workers"
_APART, _ALIKE = PartitionSpec(_AXIS), PartitionSpec()


@final
class Processes:
    """All processes of `jax.distributed`; each is a worker, and all must make the same calls.

    Only the first device of each process takes part in an exchange.
    """

    def __init__(self) -> None:
        leave_mark(LaunchSettings.from_environment(os.environ), distributed.global_state.process_id)
        self.rank, self.count = jax.process_index(), jax.process_count()
        first = {each.process_index: each for each in reversed(jax.devices())}
        self._device = first[self.rank]
        mesh = Mesh(np.array([first[rank] for rank in range(self.count)]), (_AXIS,))
        self._apart = NamedSharding(mesh, _APART)
        self._summed = jax.jit(jax.shard_map(_weighted, mesh=mesh, in_specs=_APART, out_specs=_ALIKE))
        self._layouts: dict[Any, list[str]] = {}
        atexit.register(self._leave)  # Runs after the exit functions that the rows register.
        coordinator: str = distributed.global_state.coordinator_address or ""  # The address of process 0.
        self._rows: RowExchange | None = None  # Its start needs `mean`.
        self.rows = self._rows = RowExchange(
            rank=self.rank,
            workers=self.count,
            host=coordinator.rpartition(":")[0].strip("[]"),
            framework="JAX",
            add_up=lambda vector: self.mean(vector, 1.0),
        )

    def mean(self, tree: Tree, weight: float) -> Tree:
        """The sum of all workers' arrays, each times its worker's `weight`; the arrays stay on their devices.

        They are multiplied and summed in float32, or in their own precision if that is higher.

        Raises:
            DisagreementError: The workers have different arrays.
            WorkerLostError: A worker is gone.
        """
        leaves, form = jax.tree.flatten(tree)
        if self.count == 1 or not leaves:
            return tree
        if self._rows is not None:
            key = form, tuple((np.shape(each), dtype_of(each)) for each in leaves)
            layout = self._layouts.get(key) or self._layouts.setdefault(key, layout_of(tree))
            self._rows.gather.require_same(layout)
        if weight == 0:  # For a copy of another worker's sample: 0 times NaN would be NaN.
            leaves = [jnp.zeros_like(each) for each in leaves]
        try:
            together = self._summed([self._stacked(each) for each in leaves], self._stacked(np.asarray(weight)))
            sums = jax.block_until_ready([each.addressable_data(0) for each in together])
        except (ValueError, RuntimeError):  # jaxlib raises Gloo's errors as either type.
            if self._rows is not None:
                self._rows.failed()
            raise
        back = [
            jax.device_put(new, old.sharding) if isinstance(old, jax.Array) else new
            for new, old in zip(sums, leaves, strict=True)
        ]
        return jax.tree.unflatten(form, back)

    def _leave(self) -> None:
        """If a worker is lost, wait briefly: at exit JAX would wait until its coordinator aborts this process."""
        if self._rows is not None and self._rows.lost:
            leaving = Thread(target=clean_up, daemon=True)
            leaving.start()
            leaving.join(_LEAVE_SECONDS)
            atexit.unregister(clean_up)

    def _stacked(self, own: Any) -> Any:
        """This worker's array as its row of an array over all workers."""
        row = jax.device_put(own, self._device)[None]
        return jax.make_array_from_single_device_arrays((self.count, *row.shape[1:]), self._apart, [row])


def dtype_of(leaf: Any) -> Any:
    """The dtype of a number or an array; a ConfigError if the leaf is neither, or is not of this process alone."""
    if not getattr(leaf, "is_fully_addressable", True):
        raise ConfigError(
            "an array is spread over the devices of several processes, each of which is a worker with a batch of its"
            " own: keep weights and batches on jax.local_devices(), and let session.mean exchange gradients"
        )
    try:
        return jax.typeof(leaf).dtype
    except (TypeError, OverflowError):
        told = getattr(leaf, "dtype", shown(leaf))
        raise ConfigError(f"workers exchange numbers and arrays of numbers, not {told}: leave it out") from None


def layout_of(tree: Any, content: Callable[[Any], str] = lambda leaf: "") -> list[str]:
    """A description of a tree's leaves: their paths, dtypes and shapes, and `content` of each."""
    return [
        f"an array {jax.tree_util.keystr(path)}: {dtype_of(each)} {list(np.shape(each))}{content(each)}"
        for path, each in jax.tree_util.tree_leaves_with_path(tree)
    ]


def checksum_of(leaf: Any) -> str:
    """The checksum of an array's values, for `layout_of`."""
    values = jax.random.key_data(leaf) if jnp.issubdtype(dtype_of(leaf), jax.dtypes.prng_key) else leaf
    return f" with the checksum {zlib.crc32(np.ascontiguousarray(values).tobytes()):08x}"


def _weighted(leaves: list[Any], weight: Any) -> list[Any]:
    """The weighted sum over the mesh of each array; every array has a first axis of 1 here."""
    # Each exchange costs milliseconds, so small arrays of the same precision are joined.
    joined: dict[Any, list[int]] = {}
    for number, each in enumerate(leaves):
        wide = jnp.promote_types(each.dtype, jnp.float32)
        joined.setdefault((wide, number if each.size > _MAX_JOINED else None), []).append(number)
    sums: dict[int, Any] = {}
    for (wide, _), numbers in joined.items():
        flat = jnp.concatenate([leaves[each].astype(wide).reshape(-1) for each in numbers])
        ends = np.cumsum([leaves[each].size for each in numbers])[:-1]
        parts = jnp.split(jax.lax.psum(flat * weight[0].astype(wide), _AXIS), ends)
        sums |= zip(numbers, parts, strict=True)
    return [sums[number].reshape(each.shape[1:]).astype(each.dtype) for number, each in enumerate(leaves)]
