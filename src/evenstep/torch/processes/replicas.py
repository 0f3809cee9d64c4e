"""Joins processes of a device mesh as workers of several processes each."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from math import prod
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from evenstep.core.backends import GLOO
from evenstep.core.errors import ConfigError
from evenstep.launch.connections import connections
from evenstep.torch.processes.workers import Workers
from evenstep.worker.peers import Peers


def peers_of(mesh: DeviceMesh, data_dims: Sequence[str]) -> Peers:
    """The workers of this mesh: processes that differ only outside `data_dims` are peers in one worker.

    Raises:
        ConfigError: The mesh has no such dimensions, only one worker along them, or not all processes.
    """
    names = mesh.mesh_dim_names or ()
    if not data_dims or not set(data_dims) <= set(names) or len(set(data_dims)) < len(data_dims):
        raise ConfigError(
            f"data_dims must name the dimensions of the mesh along which batches differ, some of {list(names)}, not"
            f" {list(data_dims)}: give the mesh such names (mesh_dim_names), and name them in data_dims"
        )
    if mesh.size() != dist.get_world_size():
        raise ConfigError(
            f"the mesh has {mesh.size()} of {dist.get_world_size()} processes: give the whole mesh, not a slice of it"
        )
    others = tuple(name for name in names if name not in data_dims)
    ranks = mesh.mesh.permute([names.index(name) for name in (*data_dims, *others)])
    first, *shards = ranks.shape[: len(data_dims)]
    if first * prod(shards) < 2:
        raise ConfigError(
            f"the mesh has one replica along {list(data_dims)}, which has no other to share batches with: train it"
            " without evenstep, or on more devices"
        )
    return Peers(ranks=ranks.reshape(first, prod(shards), -1).numpy(), dims=tuple(data_dims), others=others)


def as_replica(processes: Workers, peers: Peers) -> Workers:
    """This process as a peer in a worker. All processes must call it together; they have met and agreed on the mesh."""
    worker, peer = peers.place_of(processes.rank)
    ranks = peers.ranks.reshape(peers.count, -1)[:, peer].tolist()
    limit = timedelta(seconds=processes.timeout_seconds)
    before = connections().keys()

    def new(backend: Any) -> dist.ProcessGroup:
        group: dist.ProcessGroup = dist.new_group(ranks, timeout=limit, backend=backend, use_local_synchronization=True)
        return group

    host_group = new(GLOO)
    device_group = host_group
    if processes.device_group is not processes.host_group:
        device_group = new(dist.get_backend(processes.device_group))
    made = frozenset(connections().keys() - before)
    return replace(
        processes,
        rank=worker,
        count=peers.count,
        host_group=host_group,
        device_group=device_group,
        peers=peers,
        everyone=replace(processes, peers=peers, connections=processes.connections | made),
    )
