"""The workers of a run under TensorFlow: their addresses and their collectives."""

import json
import os
import signal
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, final

import tensorflow as tf

from evenstep.core.errors import ConfigError
from evenstep.core.shown import shown
from evenstep.launch.launch_settings import LaunchSettings
from evenstep.launch.marks import leave_mark
from evenstep.worker.api.row_exchange import RowExchange

_GROUP: Final = 0x65760000
"""Keys of groups and instances start here, away from those of TensorFlow's strategies, which count from 0 and 1."""
_MAX_GATHERED: Final = 2**18
"""The most elements on all workers of a vector that is gathered and summed, with half the messages of a reduction."""


@final
class Peers:
    """This process among the workers.

    The collectives have constant keys, so that a function that one worker retraces still matches those of the others.

    Attributes:
        rank: This worker, 0 to `count` - 1.
        count: The number of workers.
        rows: Exchanges rows outside of TensorFlow's collectives.
    """

    def __init__(self, *, rank: int, count: int, host: str) -> None:
        self.rank = rank
        self.count = count
        self.rows = RowExchange(
            rank=rank,
            workers=count,
            host=host,
            framework="TensorFlow",
            add_up=lambda vector: self.sum(tf.constant(vector)).numpy(),
            everywhere=True,
        )

    def sum(self, tensor: Any) -> Any:
        """The sum of a vector over all workers, inside or outside a `tf.function`."""
        if self.count == 1:
            return tensor
        length = tensor.shape[0]
        # TensorFlow requires that the key of a kind and a length stays the same.
        options = self._options(tensor, zlib.crc32(f"{tensor.dtype.name} {length}".encode()) & 0x7FFFFFFF)
        if tensor.dtype == tf.float32 and length * self.count <= _MAX_GATHERED:
            rows = tf.raw_ops.CollectiveGatherV2(**options)
            return tf.reduce_sum(tf.reshape(rows, [self.count, length]), 0)
        return tf.raw_ops.CollectiveReduceV2(merge_op="Add", final_op="Id", **options)

    def gather(self, tensor: Any) -> Any:
        """The concatenated vectors of all workers; they have the same length, which need not be constant."""
        name = tf.strings.join([f"gather {tensor.dtype.name} ", tf.strings.as_string(tf.size(tensor))])
        key = tf.cast(tf.strings.to_hash_bucket_fast(name, 2**31 - 1), tf.int32)
        return tf.raw_ops.CollectiveGatherV2(**self._options(tensor, key))

    def _options(self, tensor: Any, key: Any) -> dict[str, Any]:
        return {
            "input": tensor,
            "group_size": self.count,
            "group_key": _GROUP + 1 + tensor.dtype.is_integer,  # Integers are kept on hosts.
            "instance_key": key,
            "ordering_token": [],
        }

    def broadcast(self, variables: Sequence[Any]) -> None:
        """Set the variables to their values on worker 0."""
        if self.count == 1:
            return
        for variable in variables:
            value = tf.reshape(tf.convert_to_tensor(variable), [-1])
            if value.dtype.is_floating or value.dtype in (tf.int32, tf.int64):
                first = self.sum(value if self.rank == 0 else tf.zeros_like(value))
                variable.assign(tf.reshape(first, variable.shape))


_joined: Peers | None = None


def init() -> Peers:
    """Join the other workers, before TensorFlow makes its first tensor, model or dataset.

    The workers are those that TF_CONFIG lists; without it this process trains alone.

    Raises:
        ConfigError: TF_CONFIG is wrong, or the call comes too late.
    """
    global _joined
    if _joined is None:
        rank, addresses = read_place(os.environ)
        if len(addresses) > 1:
            leave_mark(LaunchSettings.from_environment(os.environ), rank)
            _connect(len(addresses))
        _joined = Peers(rank=rank, count=len(addresses), host=addresses[0].rpartition(":")[0].strip("[]"))
    return _joined


def joined() -> Peers:
    """Return the workers from `init`.

    Raises:
        ConfigError: `init` was not called.
    """
    if _joined is None:
        raise ConfigError("call evenstep.tensorflow.init() first, before TensorFlow makes its first tensor or model")
    return _joined


def read_place(environment: Mapping[str, str]) -> tuple[int, list[str]]:
    """This worker's rank, and the addresses of all workers.

    Raises:
        ConfigError: TF_CONFIG is damaged, or describes tasks that are not workers.
    """
    text = environment.get("TF_CONFIG", "")
    if not text:
        count = environment.get("WORLD_SIZE", "1")
        if count != "1":
            raise ConfigError(
                f"there are {count} workers but no TF_CONFIG: set it for each of them, with the addresses of all"
            )
        return 0, ["localhost:0"]
    try:
        config = json.loads(text)
        tasks = {
            name: addresses if isinstance(addresses, list) else [] for name, addresses in config["cluster"].items()
        }
        kind, index = config["task"]["type"], int(config["task"]["index"])
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ConfigError(f"TF_CONFIG must have a cluster and a task, not {shown(text)}") from None
    if tasks.keys() - {"worker", "chief"}:
        raise ConfigError(
            f"TF_CONFIG lists {', '.join(tasks)}: list workers only, which sum their gradients without parameter"
            " servers of TensorFlow's"
        )
    addresses = [*tasks.get("chief", []), *tasks.get("worker", [])]
    if kind not in tasks or not 0 <= index < len(tasks[kind]) or not all(isinstance(each, str) for each in addresses):
        raise ConfigError(
            f"TF_CONFIG must list the address of this task, {kind} {index}, such as host:port in"
            f" {shown(json.dumps(config['cluster']))}"
        )
    return index + (len(tasks.get("chief", [])) if kind == "worker" else 0), addresses


def _connect(count: int) -> None:
    """Let TensorFlow connect the workers; its strategy has no other use here."""
    try:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    except RuntimeError as error:
        raise ConfigError(
            "evenstep.tensorflow.init() comes too late: call it before TensorFlow makes its first tensor or model"
        ) from error
    with suppress(ValueError):  # Only the main thread may. TensorFlow's SIGTERM handler would not end a worker.
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
    if strategy.num_replicas_in_sync != count:
        raise ConfigError(
            f"{count} workers have {strategy.num_replicas_in_sync} devices: start a worker for each, and show it that"
            " one alone, with CUDA_VISIBLE_DEVICES"
        )
