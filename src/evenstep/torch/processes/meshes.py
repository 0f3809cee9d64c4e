"""Joins processes of a device mesh as workers of several processes each."""

import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from evenstep.core.backends import GLOO
from evenstep.core.errors import ConfigError
from evenstep.torch.processes.connections import connections
from evenstep.torch.processes.workers import Workers, new_group
from evenstep.worker.peers import Peers


def peers_of(mesh: DeviceMesh, data_dims: Sequence[str]) -> Peers:
    """The workers of this mesh: processes that differ only outside `data_dims` are peers in one worker.

    Raises:
        ConfigError: The mesh has no such dimensions, only one worker along them, or not all processes.
    """
    peers = _peers_in(mesh, data_dims, possible=bool(data_dims))
    if peers.count < 2:
        raise ConfigError(
            f"the mesh has one replica along {list(data_dims)}, which has no other to share batches with: train it"
            " without evenstep, or on more devices"
        )
    return peers


def _peers_in(mesh: DeviceMesh, data_dims: Sequence[str], *, possible: bool = True) -> Peers:
    names = mesh.mesh_dim_names or ()
    if not possible or not set(data_dims) <= set(names) or len(set(data_dims)) < len(data_dims):
        raise ConfigError(
            f"data_dims must name the dimensions of the mesh along which batches differ, some of {list(names)}, not"
            f" {list(data_dims)}: give the mesh such names (mesh_dim_names), and name them in data_dims"
        )
    if mesh.size() != dist.get_world_size():
        raise ConfigError(
            f"the mesh has {mesh.size()} of {dist.get_world_size()} processes: give the whole mesh, not a slice of it"
        )
    others = tuple(name for name in names if name not in data_dims)
    if "pp" in others:
        raise ConfigError(
            "the stages of a pipeline (the dimension 'pp') cut each batch into a fixed number of micro-batches, and"
            " prepare does not make batches of them: use evenstep.Balancer, as in docs/meshes.md (Pipelines)"
        )
    ranks = mesh.mesh.permute([names.index(name) for name in (*data_dims, *others)])
    first, *shards = ranks.shape[: len(data_dims)] or (1,)
    return Peers(ranks=ranks.reshape(first, prod(shards), -1).numpy(), dims=tuple(data_dims), others=others)


def inside_of(mesh: DeviceMesh, data_dims: Sequence[str], timeout_seconds: float) -> Workers:
    """This process among those of its own replica, whose mesh this is. All of them must call it together.

    With `data_dims`, the replica has several workers, whose batches differ and have the same size, to one sample.

    Raises:
        ConfigError: The mesh has no such dimensions, or not all processes.
    """
    peers = _peers_in(mesh, data_dims)
    peers = replace(peers, ranks=peers.ranks.reshape(1, peers.count, -1))
    group = new_group([range(dist.get_world_size())], GLOO, timeout_seconds)
    host, rank = socket.gethostname(), dist.get_rank()
    each = Workers(rank=rank, count=dist.get_world_size(), host=host, timeout_seconds=timeout_seconds, host_group=group)
    worker, _ = peers.place_of(rank)
    return replace(each, rank=worker, count=peers.count, host_group=None, peers=peers, everyone=each)


def among(inside: Workers, place: tuple[int, int], rows: Callable[[torch.Tensor], torch.Tensor]) -> Workers:
    """This process among the workers of all replicas, of which its own has this `place`: its rank, and their number.

    Args:
        inside: As `inside_of` returns it, or a worker that is alone.
        place: The rank of the replica, and the number of replicas.
        rows: Stacks a tensor of each process, [processes, ...]; all must call it together.
    """
    rank, count = place
    if inside.peers is None:
        return replace(inside, rank=rank, count=count, rows=rows)
    each, (worker, peer) = inside.processes, inside.peers.place_of(inside.processes.rank)
    ranks = inside.peers.ranks + each.count * np.arange(count).reshape(-1, 1, 1)
    peers, own = replace(inside.peers, ranks=ranks), torch.from_numpy(ranks[..., peer].reshape(-1))
    return replace(
        inside,
        rank=rank * inside.count + worker,
        count=count * inside.count,
        rows=lambda row: rows(row)[own],
        peers=peers,
        everyone=replace(
            each, rank=rank * each.count + each.rank, count=count * each.count, host_group=None, rows=rows
        ),
        inside=inside,
    )


def as_replica(processes: Workers, peers: Peers) -> Workers:
    """This process as a peer in a worker. All processes must call it together; they have met and agreed on the mesh."""
    worker, _ = peers.place_of(processes.rank)
    each = peers.ranks.reshape(peers.count, -1).T.tolist()
    seconds, before = processes.timeout_seconds, connections().keys()
    host_group = device_group = new_group(each, GLOO, seconds)
    if processes.device_group is not processes.host_group:
        device_group = new_group(each, dist.get_backend(processes.device_group), seconds)
    made = frozenset(connections().keys() - before)
    return replace(
        processes,
        rank=worker,
        count=peers.count,
        host_group=host_group,
        device_group=device_group,
        hosts=tuple(processes.hosts[rank] for rank in next(part for part in each if processes.rank in part)),
        peers=peers,
        everyone=replace(processes, peers=peers, connections=processes.connections | made),
    )
