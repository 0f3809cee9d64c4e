"""The workers of MXNet's distributed kvstore: sums over all of them, and rows that do not travel as floats."""

import atexit
import os
import socket
import sys
from collections.abc import Sequence
from itertools import count
from typing import Any, final

import mxnet as mx
import numpy as np
from mxnet.base import _LIB  # There is no public way to leave a store whose other workers do not come.

from evenstep.core.errors import ConfigError
from evenstep.core.shown import shown
from evenstep.launch.launch_settings import LaunchSettings
from evenstep.launch.marks import leave_mark
from evenstep.worker.api.row_exchange import RowExchange

_keys = count(1 << 20)  # Above the keys of a Trainer, which numbers its parameters from 0.
_key_of: dict[tuple[str, int], int] = {}
"""The store's keys by dtype and length; the server keeps them while this process runs."""


@final
class StoreWorkers:
    """All workers of a store.

    The store sums floating-point vectors. It rounds integers above 2^24, and its pulls never end if a worker has died.
    So rows go through worker 0, over connections that break when a worker dies, and before each sum.

    Args:
        store: A kvstore, or its name.

    Raises:
        ConfigError: The store does not wait for all workers.
    """

    def __init__(self, store: Any) -> None:
        name = store if isinstance(store, str) else getattr(store, "type", None)
        if name not in ("dist_sync", "dist_device_sync", "dist_sync_device"):
            raise ConfigError(
                f"the kvstore of the trainer is {shown(store if name is None else name)}, which does not sum the"
                ' gradients of all workers: give kvstore="dist_sync", and start the workers with evenstep run'
                " --framework mxnet"
            )
        if os.environ.get("DMLC_ROLE") != "worker":
            raise ConfigError(
                f"the kvstore {name!r} needs a scheduler, a server and DMLC_ROLE=worker: start the script with"
                " evenstep run --framework mxnet"
            )
        leave_mark(LaunchSettings.from_environment(os.environ), os.environ.get("RANK", ""))
        self._store = mx.kv.create(store) if isinstance(store, str) else store
        self.count = int(self._store.num_workers)
        # The store numbers workers in order of arrival; a launcher's messages and --slow use the launcher's numbers.
        launched = os.environ.get("WORLD_SIZE") == str(self.count) and "RANK" in os.environ
        self.rank = int(os.environ["RANK"]) if launched else int(self._store.rank)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as trial:
            trial.connect((os.environ.get("DMLC_PS_ROOT_URI", "127.0.0.1"), 9))  # This sends nothing.
            address: str = trial.getsockname()[0]  # Where the scheduler's host reaches this one.
        atexit.register(self._leave)  # Runs after the exit functions that the rows register.
        self.rows = RowExchange(
            rank=self.rank,
            workers=self.count,
            host=address,
            framework="MXNet",
            add_up=lambda vector: self.sum(mx.nd.array(vector)).asnumpy(),
        )

    def sum(self, vector: Any) -> Any:
        """The sum of a float32 or float64 vector over all workers."""
        if self.count == 1:
            return vector
        kind = np.dtype(vector.dtype).name, vector.size
        key = _key_of.get(kind)
        if key is None:
            key = _key_of[kind] = next(_keys)
            self._store.init(key, mx.nd.zeros(vector.shape, dtype=vector.dtype))
        total = mx.nd.empty(vector.shape, dtype=vector.dtype)
        self._store.push(key, vector)
        self._store.pull(key, out=total)
        # A process that ends skips operations that it has not begun, and the others would wait for its part forever.
        total.wait_to_read()
        return total

    def broadcast(self, arrays: Sequence[Any]) -> None:
        """Set the arrays to their values on worker 0."""
        for array in arrays:
            own = array.reshape(-1) if self.rank == 0 else mx.nd.zeros(array.size, dtype=array.dtype)
            array[:] = self.sum(own).reshape(array.shape)

    def _leave(self) -> None:
        """After an error, leave the store without the others: its end waits for all, and without it MXNet aborts."""
        if self.rows.lost or getattr(sys, "last_value", None) is not None:
            _LIB.MXKVStoreSetBarrierBeforeExit(self._store.handle, 0)
            _LIB.MXKVStoreFree(self._store.handle)
            self._store.handle = None


_joined: StoreWorkers | None = None


def join(store: Any) -> StoreWorkers:
    """Join the workers of the store; a process can have only one store, because a second one never gets an answer.

    Raises:
        ConfigError: It does not wait for all workers.
    """
    global _joined
    if _joined is None:
        _joined = StoreWorkers(store)
    return _joined
