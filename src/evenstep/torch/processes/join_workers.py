"""Joins the other workers in process groups, under schemes without servers."""

import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist

from evenstep.core.disagreement import NOTHING_ASKED
from evenstep.core.errors import ConfigError, WorkerLostError
from evenstep.launch.c10d import Store, reason
from evenstep.launch.meeting_place import GRACE_SECONDS, keeper_of, meet
from evenstep.launch.store_line import within
from evenstep.torch.processes.workers import Workers

NAMING_SECONDS: Final = 2.0
"""How long the survivors of a failed collective may take to find out who is missing."""


def join_workers(device: torch.device, timeout_seconds: float, asked: Mapping[str, object] = NOTHING_ASKED) -> Workers:
    """Join the process group, initialising it from torchrun's environment where the script has not.

    Raises:
        ConfigError: torchrun's environment is incomplete, or a worker was `asked` for something wrong.
        DisagreementError: Another worker joins servers.
        WorkerLostError: Not all workers came; it names those.
    """
    alone = Workers(rank=0, count=1, host=socket.gethostname(), timeout_seconds=timeout_seconds)
    if not dist.is_available() or (not dist.is_initialized() and "WORLD_SIZE" not in os.environ):
        return alone
    rank, count = _numbers(os.environ)
    if count == 1 and dist.is_initialized():
        return alone
    store = meet(rank, count, timeout_seconds, asked=asked)
    # Leave the survivors time to name the missing worker within the timeout that the user gave.
    limit = timedelta(seconds=max(timeout_seconds - NAMING_SECONDS, timeout_seconds / 2))
    host_group, device_group = _connect(device, store, rank, count, limit)
    if count == 1:
        return alone
    return Workers(
        rank=rank,
        count=count,
        host=alone.host,
        timeout_seconds=timeout_seconds,
        host_group=host_group,
        device_group=device_group,
        store=store,
    )


def _numbers(environment: Mapping[str, str]) -> tuple[int, int]:
    """Rank and number of workers."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if missing:
        raise ConfigError(f"WORLD_SIZE is set but {' and '.join(missing)} is not: start the script with torchrun")
    return int(environment["RANK"]), int(environment["WORLD_SIZE"])


_Groups = tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]


def _connect(device: torch.device, store: Store, rank: int, count: int, limit: timedelta) -> _Groups:
    """The group of the hosts and that of the devices, over the store that all workers have come to.

    Raises:
        WorkerLostError: Some cannot be reached.
    """
    keeper = keeper_of(store, os.environ)
    on_gpu, initialised = device.type == "cuda", dist.is_initialized()
    if on_gpu and not initialised and "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    current = torch.cuda.current_device() if on_gpu else None

    def connect() -> _Groups:
        if current is not None:
            torch.cuda.set_device(current)  # Each thread has a device of its own.
        if not initialised:
            dist.init_process_group(
                "nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=count, timeout=limit
            )
        if count == 1:
            return None, None
        host_group = dist.new_group(backend="gloo", timeout=limit)
        return host_group, dist.new_group(backend="nccl", timeout=limit) if on_gpu else host_group

    try:
        return within(limit.total_seconds() + GRACE_SECONDS, connect)
    except TimeoutError:
        raise WorkerLostError(keeper.unreachable()) from None
    except RuntimeError as error:
        raise WorkerLostError(
            f"all {count} workers came to prepare, but could not connect to each other within"
            f" {limit.total_seconds():g} s ({reason(error)}): look at their output and at the network between their"
            " hosts (GLOO_SOCKET_IFNAME names the interface), then start again"
        ) from None
