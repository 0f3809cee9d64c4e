"""A hierarchical sum: each host adds up its workers' vectors, and sends one vector to the other hosts."""

from collections.abc import Callable, Hashable
from functools import partial
from typing import final

import torch
import torch.distributed as dist

from evenstep.core.backends import GLOO
from evenstep.core.groups import by_host
from evenstep.schemes.scheme import Wire
from evenstep.torch.engines.narrow import NarrowSum
from evenstep.torch.processes.workers import Workers, new_group


@final
class HierarchicalSum:
    """Sums vectors over all workers, in place: over those of each host, then over the hosts.

    A ring through n workers, such as Gloo's, crosses the cable of a host with 2 (n - 1) / n times the bytes of the
    vector. Here n is the number of hosts. NCCL knows hosts, and sums whole numbers itself; a narrow wire is ours.

    Args:
        workers: All workers, who have groups. They must call this, and each sum, together.
        wire: The format in which `changes` travel between hosts, or between workers where each is on its own.
    """

    def __init__(self, workers: Workers, wire: Wire) -> None:
        group = workers.device_group
        assert group is not None
        self._inside: dist.ProcessGroup | None = None
        self._first = True
        backend, hosts = dist.get_backend(group), by_host(workers.hosts)
        if (backend == GLOO or wire != "float32") and 1 < len(hosts) < workers.count:
            ranks, seconds = dist.get_process_group_ranks(group), workers.timeout_seconds
            members = [[ranks[worker] for worker in host] for host in hosts]
            first = [each[0] for each in members]
            self._first = dist.get_rank() in first
            self._inside = new_group(members, backend, seconds)
            group = new_group([first, [rank for rank in ranks if rank not in first]], backend, seconds)
        self._group, self._stays = group, self._inside is None or workers.given_group is not None
        self._narrow = None if wire == "float32" else NarrowSum(wire, group)

    @property
    def narrows(self) -> bool:
        """True if `changes` travel in a narrow format."""
        return self._narrow is not None

    def add_up(self, vector: torch.Tensor) -> None:
        """Replace a vector by its sum over all workers.

        Raises:
            RuntimeError: A collective failed.
        """
        self._over_hosts(vector, partial(dist.all_reduce, group=self._group))

    def changes(self, key: Hashable, vector: torch.Tensor) -> None:
        """As `add_up`, in the narrow format, whose rounding is kept for the next sum of this key."""
        assert self._narrow is not None
        narrow = self._narrow
        self._over_hosts(vector, lambda own: own.copy_(narrow.sum(key, own)))

    def close(self) -> None:
        """Leave the groups made here; all workers must. Beside a given group they stay: see `new_group`."""
        if not self._stays:
            for group in (self._inside, self._group):
                dist.destroy_process_group(group)

    def _over_hosts(self, vector: torch.Tensor, between: Callable[[torch.Tensor], object]) -> None:
        if self._inside is not None:
            dist.reduce(vector, group=self._inside, group_dst=0)
        if self._first:
            between(vector)
        if self._inside is not None:
            dist.broadcast(vector, group=self._inside, group_src=0)
