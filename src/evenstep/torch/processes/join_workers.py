"""Joins the other workers in process groups, under schemes without servers."""

import atexit
import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist

from evenstep.core.backends import GLOO, common_backend
from evenstep.core.disagreement import NOTHING_ASKED
from evenstep.launch.c10d import Store
from evenstep.torch.processes.connections import connections
from evenstep.torch.processes.meeting_place import meet
from evenstep.torch.processes.store_line import bounded, keeper_of
from evenstep.torch.processes.workers import Workers, new_group, place_of

NAMING_SECONDS: Final = 2.0
"""The time that the survivors of a failed collective have to find out which worker is missing."""

# A forked process, such as a data worker, never collects what existed before it. That may hold the connections of a
# closed run, in a cycle. Gloo closes a connection with its threads, which a fork does not have, and on the parent's
# descriptors: collecting in the child would hang forever, or end the parent.
os.register_at_fork(before=gc.freeze, after_in_parent=gc.unfreeze)

_Groups: TypeAlias = tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]


def join_workers(
    device: torch.device,
    timeout_seconds: float,
    asked: Mapping[str, object] = NOTHING_ASKED,
    process_group: dist.ProcessGroup | None = None,
) -> Workers:
    """Join the process group, and initialise it from torchrun's environment if the script has not.

    If the script gives a `process_group`, its members are the workers. It carries their gradients unless their
    devices differ.

    Raises:
        ConfigError: torchrun's environment is incomplete, a worker's request (`asked`) is wrong, or no backend carries
            the gradients of all workers' devices.
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
    place = {"host": host, "machine": _machine(), "pid": os.getpid()}
    own = {**asked, "device": device.type, "backend": "", **place}
    with suppress(ValueError):  # There is no default backend of this device type.
        own["backend"] = dist.get_default_backend_for_device(device)
    name = "" if process_group is None or process_group is dist.group.WORLD else process_group.group_name
    store, told = meet(rank, count, timeout_seconds, asked=own, group=name)
    devices, backends = [str(each["device"]) for each in told], [str(each["backend"]) for each in told]
    backend = common_backend(devices, backends, dist.Backend.backend_capability[GLOO])
    # The survivors need time to name the missing worker within the user's timeout.
    limit = timedelta(seconds=max(timeout_seconds - NAMING_SECONDS, timeout_seconds / 2))
    given = None if len(set(backends)) > 1 else process_group

    def make() -> _Groups:
        """The groups of hosts and of devices, the latter the script's own if it gave one."""
        if not dist.is_initialized():
            dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=limit)
        if count == 1:
            return None, None
        ranks, seconds = dist.get_process_group_ranks(process_group), limit.total_seconds()
        host_group = new_group([ranks], GLOO, seconds)
        return host_group, given or (host_group if backend == GLOO else new_group([ranks], backend, seconds))

    before = connections().keys()
    host_group, device_group = _connect(make, device, store, count, limit)
    if count == 1:
        return alone
    atexit.unregister(await_gloo)  # Once is enough for all runs of a process.
    atexit.register(await_gloo)
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
        hosts=tuple(each["host"] + each["machine"] for each in told),
        connections=frozenset(connections().keys() - before),
    )


def await_gloo(seconds: float = 1.0) -> None:
    """Let Gloo's threads drop what they hold, for at most these seconds: on a busy machine they wait for a processor.

    A thread that needs the interpreter for that when it has ended kills the process: `terminate called without an
    active exception` (Python before 3.14).
    """
    until, own = time.monotonic() + seconds, str(threading.get_native_id())
    runs = True
    while runs and time.monotonic() < until:
        time.sleep(0.05)
        runs = False
        with suppress(OSError):  # A thread may end meanwhile.
            others = (each / "stat" for each in Path("/proc/self/task").iterdir() if each.name != own)
            runs = any(each.read_text().rpartition(")")[2].split()[0] == "R" for each in others)


def _machine() -> str:
    """Identifies where process ids have the same meaning: one boot of a machine, and one container on it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text() + str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return socket.gethostname()


def _connect(make: Callable[[], _Groups], device: torch.device, store: Store, count: int, limit: timedelta) -> _Groups:
    """The groups that `make` returns, over the store in which all workers have met."""
    module: Any = getattr(torch, device.type, None)
    chooses = device.type != "cpu" and hasattr(module, "set_device")
    if chooses and not dist.is_initialized() and "LOCAL_RANK" in os.environ:
        module.set_device(int(os.environ["LOCAL_RANK"]))
    current = module.current_device() if chooses else None

    def connect() -> _Groups:
        if current is not None:
            module.set_device(current)  # The current device is per thread.
        return make()

    def failed(why: str) -> str:
        return (
            f"all {count} workers came to prepare, but could not connect to each other within"
            f" {limit.total_seconds():g} s ({why}): look at their output and at the network between their hosts"
            " (GLOO_SOCKET_IFNAME names the interface), then start again"
        )

    return bounded(connect, limit.total_seconds(), keeper_of(store, os.environ), failed)
