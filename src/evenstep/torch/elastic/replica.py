"""A replica under `evenstep run --elastic`: its session, on a manager of torchft."""

import logging
import os
import socket
import warnings
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torchft import Manager, ProcessGroupGloo, ProcessGroupNCCL

from evenstep.core.errors import ConfigError
from evenstep.launch.c10d import TCPStore
from evenstep.launch.launch_settings import LaunchSettings
from evenstep.torch.elastic.session import ElasticOptions, ElasticSession, slot_of


def session_of(
    model: torch.nn.Module, launched: LaunchSettings, timeout: float | None, options: Mapping[str, Any]
) -> ElasticSession:
    """Return the session of a replica that the launcher started, for this model and these options of `prepare`.

    Raises:
        ConfigError: An option is not possible while members come and go.
    """
    others = [name for name, value in options.items() if name not in _POSSIBLE and value != _USUAL.get(name)]
    if others:
        raise ConfigError(
            f"{others[0]} is not possible under evenstep run --elastic: leave it out, or run without --elastic"
        )
    chosen: Any = {name: value for name, value in options.items() if name in _POSSIBLE}
    manager = manager_of(launched, launched.timeout_seconds(timeout), next(model.parameters()).device.type)
    return ElasticSession(manager, **chosen)


_RETRIES: Final = 1000
"""How often a request is sent again to a Lighthouse that was started again, within the time of the request."""
_POSSIBLE = frozenset({"scheme", *ElasticOptions.__annotations__})
_USUAL = {"empty": "copy", "uneven": "continue", "weights": "samples", "accumulation": 1}


def manager_of(launched: LaunchSettings, timeout_seconds: float, device: str) -> Manager:
    """Return torchft's manager of this replica, with the store of its processes, or of its own if it is one process.

    Raises:
        ConfigError: The script has made a process group of all replicas, or none of the processes of this one.
    """
    assert launched.elastic is not None
    count, slot = launched.nproc_per_replica, slot_of(launched)[0]
    if count > 1 and not dist.is_initialized():
        raise ConfigError(
            f"a replica of {count} processes has a process group of these, in which its model is split: call"
            " init_process_group before prepare"
        )
    if count == 1 and dist.is_initialized():
        raise ConfigError(
            "a process group of all replicas does not outlive the first of them: under evenstep run --elastic leave out"
            " init_process_group, or give --nproc-per-replica, for a group of the processes of each replica"
        )
    if not logging.getLogger("torchft").level:  # The launcher tells in a sentence who is lost.
        logging.getLogger("torchft").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", message="The given buffer is not writable")  # Of each state that is received.
    timeout = timedelta(seconds=timeout_seconds)
    host = "localhost" if launched.on_one_host else socket.gethostname()
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False) if count == 1 else None
    manager = Manager(
        pg=(ProcessGroupNCCL if device == "cuda" else ProcessGroupGloo)(timeout=timeout),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=launched.elastic[0],
        use_async_quorum=False,
        timeout=timeout,
        quorum_timeout=timeout,
        connect_timeout=timeout,
        quorum_retries=_RETRIES,
        rank=0 if count == 1 else dist.get_rank(),
        world_size=count,
        store_addr=host,
        store_port=int(os.environ["MASTER_PORT"]) if store is None else store.port,
        lighthouse_addr=launched.lighthouse,
        replica_id=f"{socket.gethostname()}-{slot}",
        hostname=host,
    )
    manager._evenstep_store = store  # If it is this process's, it lives as long as the manager.
    return manager
