"""Joins the other workers in process groups, under schemes without servers."""

import os
import socket
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist

from evenstep.core.backends import GLOO, common_backend
from evenstep.core.disagreement import NOTHING_ASKED
from evenstep.core.errors import WorkerLostError
from evenstep.launch.c10d import Store, reason
from evenstep.launch.connections import connections
from evenstep.launch.meeting_place import GRACE_SECONDS, keeper_of, meet
from evenstep.launch.store_line import within
from evenstep.torch.processes import forks  # noqa: F401 (what it keeps from forks is made here)
from evenstep.torch.processes.workers import Workers, place_of

NAMING_SECONDS: Final = 2.0
"""How long the survivors of a failed collective may take to find out which worker is missing."""

_Groups: TypeAlias = tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]


def join_workers(
    device: torch.device,
    timeout_seconds: float,
    asked: Mapping[str, object] = NOTHING_ASKED,
    process_group: dist.ProcessGroup | None = None,
) -> Workers:
    """Join the process group, and initialise it from torchrun's environment if the script has not.

    With a `process_group` of the script, its members are the workers. It carries their gradients unless their devices
    differ.

    Raises:
        ConfigError: torchrun's environment is incomplete, a worker was `asked` for something wrong, or no backend
            carries the gradients of all workers' devices.
        DisagreementError: Another worker joins servers.
        WorkerLostError: Not all workers came; it names those that did not.
    """
    host = socket.gethostname()
    alone = Workers(rank=0, count=1, host=host, timeout_seconds=timeout_seconds)
    if not dist.is_available() or (not dist.is_initialized() and "WORLD_SIZE" not in os.environ):
        return alone
    rank, count = place_of("MASTER_ADDR", "MASTER_PORT", group=process_group)
    if count == 1 and dist.is_initialized():
        return alone
    own = {**asked, "device": device.type, "backend": _backend_of(device), "machine": _machine(), "pid": os.getpid()}
    name = "" if process_group is None or process_group is dist.group.WORLD else process_group.group_name
    store, told = meet(rank, count, timeout_seconds, asked=own, group=name)
    devices, backends = [str(each["device"]) for each in told], [str(each["backend"]) for each in told]
    backend = common_backend(devices, backends, dist.Backend.backend_capability[GLOO])
    # The survivors need time to name the missing worker within the user's timeout.
    limit = timedelta(seconds=max(timeout_seconds - NAMING_SECONDS, timeout_seconds / 2))
    given = None if len(set(backends)) > 1 else process_group
    make = partial(_groups, backend, store, rank, count, limit, given=given, among=process_group)
    before = connections().keys()
    host_group, device_group = _connect(make, device, store, count, limit)
    if count == 1:
        return alone
    return Workers(
        rank=rank,
        count=count,
        host=host,
        timeout_seconds=timeout_seconds,
        host_group=host_group,
        device_group=device_group,
        given_group=process_group,
        on_host=backend == GLOO and set(devices) == {"cpu"},
        store=store,
        machines=tuple(each["machine"] for each in told),
        pids=tuple(each["pid"] for each in told),
        connections=frozenset(connections().keys() - before),
    )


def _machine() -> str:
    """Where the number of a process means the same: a start of a machine, and there the same container."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text() + str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return socket.gethostname()


def _backend_of(device: torch.device) -> str:
    """The default backend of this type of device; empty if it has none."""
    try:
        return dist.get_default_backend_for_device(device)
    except ValueError:
        return ""


def _groups(
    backend: str,
    store: Store,
    rank: int,
    count: int,
    limit: timedelta,
    *,
    among: dist.ProcessGroup | None,
    given: dist.ProcessGroup | None,
) -> _Groups:
    """The group of the hosts and that of the devices, which is `given` if there is one, of the members of `among`."""
    if not dist.is_initialized():
        dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=limit)
    if count == 1:
        return None, None
    ranks = None if among is None else dist.get_process_group_ranks(among)
    new = partial(dist.new_group, ranks, timeout=limit, use_local_synchronization=among is not None)
    host_group = new(backend=GLOO)
    return host_group, given or (host_group if backend == GLOO else new(backend=backend))


def _connect(make: Callable[[], _Groups], device: torch.device, store: Store, count: int, limit: timedelta) -> _Groups:
    """The groups that `make` returns, over the store in which all workers have met."""
    keeper = keeper_of(store, os.environ)
    module: Any = getattr(torch, device.type, None)
    chooses = device.type != "cpu" and hasattr(module, "set_device")
    if chooses and not dist.is_initialized() and "LOCAL_RANK" in os.environ:
        module.set_device(int(os.environ["LOCAL_RANK"]))
    current = module.current_device() if chooses else None

    def connect() -> _Groups:
        if current is not None:
            module.set_device(current)  # Each thread has its own.
        return make()

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
