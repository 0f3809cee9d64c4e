"""The workers of a run under TensorFlow: who they are, and their collectives."""

import json
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
import tensorflow as tf

from evenstep.core.errors import ConfigError, WorkerLostError
from evenstep.core.shown import shown

_GROUP: Final = 0x65760000
"""Keys of groups and of instances are the run's own numbers; TensorFlow's strategies count theirs from 0 and 1."""
_PEER: Final = re.compile(r"/job:worker(?:/replica:0)?/task:(\d+)")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """This process among the workers.

    The collectives have constant keys, so that a function that one worker traces again still meets those of the others.

    Attributes:
        rank: This worker, 0 to `count` - 1.
        count: The number of workers.
    """

    rank: int
    count: int

    def all_gather(self, row: bytes) -> list[bytes]:
        """The rows of all workers by rank; in a call all have the same length, in bytes.

        Raises:
            WorkerLostError: Another worker is gone.
        """
        if self.count == 1:
            return [row]
        padded = np.frombuffer(row.ljust(-len(row) % 4 + len(row), b"\0"), dtype=np.int32)
        try:
            with tf.device("CPU:0"):
                rows = tf.raw_ops.CollectiveGatherV2(
                    input=tf.constant(padded),
                    group_size=self.count,
                    group_key=_GROUP,
                    instance_key=_key("rows", padded.size),
                    ordering_token=[],
                )
        except tf.errors.OpError as error:
            raise self._lost(error) from error
        return [each.tobytes()[: len(row)] for each in rows.numpy().reshape(self.count, -1)]

    def sum(self, tensor: Any) -> Any:
        """The sum of a vector over all workers, in a function or outside of one."""
        if self.count == 1:
            return tensor
        on_host = tensor.dtype.is_integer
        return tf.raw_ops.CollectiveReduceV2(
            input=tensor,
            group_size=self.count,
            group_key=_GROUP + 1 + on_host,
            instance_key=_key(tensor.dtype.name, tensor.shape[0]),
            ordering_token=[],
            merge_op="Add",
            final_op="Id",
        )

    def broadcast(self, variables: Sequence[Any]) -> None:
        """Give the variables the values that they have on worker 0."""
        if self.count == 1:
            return
        for variable in variables:
            value = tf.reshape(tf.convert_to_tensor(variable), [-1])
            if value.dtype.is_floating or value.dtype in (tf.int32, tf.int64):
                first = self.sum(value if self.rank == 0 else tf.zeros_like(value))
                variable.assign(tf.reshape(first, variable.shape))

    def _lost(self, error: Exception) -> WorkerLostError:
        # A worker that answers tells what it has met itself, so the last one in the text is the one that is silent.
        tasks = [int(each) for each in _PEER.findall(str(error)) if int(each) != self.rank]
        who = f"worker {tasks[-1]} is" if tasks else "another worker is"
        return WorkerLostError(f"{who} gone: its own output tells why ({str(error).strip().partition(chr(10))[0]})")


_joined: Workers | None = None


def init() -> Workers:
    """Join the other workers, before TensorFlow makes its first tensor, model or dataset.

    The workers are those that TF_CONFIG lists; without it this process trains alone.

    Raises:
        ConfigError: TF_CONFIG cannot work, or the call comes too late.
    """
    global _joined
    if _joined is None:
        rank, count = read_place(os.environ)
        if count > 1:
            _connect(count)
        _joined = Workers(rank=rank, count=count)
    return _joined


def joined() -> Workers:
    """What `init` returned.

    Raises:
        ConfigError: It was not called.
    """
    if _joined is None:
        raise ConfigError("call evenstep.tensorflow.init() first, before TensorFlow makes its first tensor or model")
    return _joined


def read_place(environment: Mapping[str, str]) -> tuple[int, int]:
    """This worker's rank, and the number of workers.

    Raises:
        ConfigError: TF_CONFIG is damaged, or describes other tasks than workers.
    """
    text = environment.get("TF_CONFIG", "")
    if not text:
        count = environment.get("WORLD_SIZE", "1")
        if count != "1":
            raise ConfigError(
                f"there are {count} workers but no TF_CONFIG: give each its own, with the addresses of all of them"
            )
        return 0, 1
    try:
        config = json.loads(text)
        tasks = {name: len(addresses) for name, addresses in config["cluster"].items()}
        kind, index = config["task"]["type"], int(config["task"]["index"])
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ConfigError(f"TF_CONFIG must have a cluster and a task, not {shown(text)}") from None
    if not tasks.keys() <= {"worker", "chief"} or kind not in tasks:
        raise ConfigError(
            f"TF_CONFIG lists {', '.join(tasks)}: list workers only, which sum their gradients without parameter"
            " servers of TensorFlow's"
        )
    chiefs = tasks.get("chief", 0)
    return index + (chiefs if kind == "worker" else 0), sum(tasks.values())


def _connect(count: int) -> None:
    """Let TensorFlow connect the workers; its strategy is needed for nothing else."""
    try:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    except RuntimeError as error:
        raise ConfigError(
            "evenstep.tensorflow.init() comes too late: call it before TensorFlow makes its first tensor or model"
        ) from error
    if strategy.num_replicas_in_sync != count:
        raise ConfigError(
            f"{count} workers have {strategy.num_replicas_in_sync} devices: start a worker for each, and show it that"
            " one alone, with CUDA_VISIBLE_DEVICES"
        )


def _key(kind: str, length: int) -> int:
    """The same on all workers for the same kind and length, which TensorFlow wants to be constant for a key."""
    return zlib.crc32(f"{kind} {length}".encode()) & 0x7FFFFFFF
