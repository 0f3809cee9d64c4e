"""This process among the workers: joining them, and agreeing with them before anything is built."""

import json
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from evenstep.core.errors import ConfigError, WorkerLostError
from evenstep.runtime.meeting_place import meeting_place

NAMING_SECONDS = 2.0
"""How long the survivors of a failed collective may take to find out who is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """This worker's rank among `count` workers, and the groups they speak over (None for a single process).

    `host_group` carries integers between the hosts' CPUs; `device_group` carries gradients and is the same group on
    the CPU.
    """

    rank: int
    count: int
    host: str
    timeout_seconds: float
    host_group: dist.ProcessGroup | None = None
    device_group: dist.ProcessGroup | None = None
    meet: Callable[[bytes], list[bytes]] | None = None
    """Where there is no group: brings everybody's record for this worker's."""

    def leave(self) -> None:
        """Leave the groups; the others must leave too."""
        for group in {id(group): group for group in (self.host_group, self.device_group)}.values():
            if group is not None:
                dist.destroy_process_group(group)


def join_workers(device: torch.device, timeout_seconds: float) -> Workers:
    """Join the process group, initialising it from torchrun's environment where the script has not.

    Raises:
        ConfigError: torchrun's environment is incomplete.
        WorkerLostError: Not all workers came.
    """
    host = socket.gethostname()
    if not dist.is_available() or (not dist.is_initialized() and "WORLD_SIZE" not in os.environ):
        return Workers(rank=0, count=1, host=host, timeout_seconds=timeout_seconds)
    # Leave the survivors time to name the missing worker within the timeout that the user gave.
    limit = timedelta(seconds=max(timeout_seconds - NAMING_SECONDS, timeout_seconds / 2))
    if not dist.is_initialized():
        missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ConfigError(f"WORLD_SIZE is set but {' and '.join(missing)} is not: start the script with torchrun")
        if device.type == "cuda" and "LOCAL_RANK" in os.environ:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        _join_default_group("nccl" if device.type == "cuda" else "gloo", limit)
    rank, count = dist.get_rank(), dist.get_world_size()
    if count == 1:
        return Workers(rank=0, count=1, host=host, timeout_seconds=timeout_seconds)
    try:
        host_group = dist.new_group(backend="gloo", timeout=limit)
        device_group = host_group if device.type == "cpu" else dist.new_group(backend="nccl", timeout=limit)
    except RuntimeError as error:
        raise WorkerLostError(
            f"not all {count} workers called prepare within {limit.total_seconds():g} s: look at their output, then"
            " start again"
        ) from error
    return Workers(
        rank=rank,
        count=count,
        host=host,
        timeout_seconds=timeout_seconds,
        host_group=host_group,
        device_group=device_group,
    )


def _join_default_group(backend: str, limit: timedelta) -> None:
    store = meeting_place(os.environ, limit)
    if store is None:
        dist.init_process_group(backend, timeout=limit)
        return
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=limit)


def gather(workers: Workers, record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every worker's record, as JSON over the host group or the servers; all workers must call it together."""
    if workers.meet is not None:
        return [json.loads(text) for text in workers.meet(json.dumps(record).encode())]
    if workers.host_group is None:
        return [json.loads(json.dumps(record))]
    text = json.dumps(record).encode()
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(workers.count)]
    dist.all_gather(lengths, torch.tensor([len(text)]), group=workers.host_group)
    longest = max(int(length) for length in lengths)
    mine = torch.zeros(longest, dtype=torch.uint8)
    mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(workers.count)]
    dist.all_gather(texts, mine, group=workers.host_group)
    return [
        json.loads(bytes(text[: int(length)].tolist()).decode()) for text, length in zip(texts, lengths, strict=True)
    ]


def minority(values: list[str]) -> list[int]:
    """The ranks whose value is not the commonest one (where several are, not the lowest rank's).

    >>> minority(["a", "b", "a"]), minority(["a", "b"]), minority(["a", "a"])
    ([1], [1], [])
    """
    if len(set(values)) == 1:
        return []
    usual = max(values, key=lambda value: (values.count(value), -values.index(value)))
    return [rank for rank, value in enumerate(values) if value != usual]


def name_workers(ranks: list[int]) -> str:
    """`worker 3`, or `workers 3, 5 and 7`.

    >>> name_workers([3]), name_workers([3, 5, 7])
    ('worker 3', 'workers 3, 5 and 7')
    """
    if len(ranks) == 1:
        return f"worker {ranks[0]}"
    return f"workers {', '.join(str(rank) for rank in ranks[:-1])} and {ranks[-1]}"
