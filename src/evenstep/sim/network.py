"""Times of sums over all workers, and of messages to and from servers over shared links."""

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal, final

from evenstep.cluster import Cluster, ClusterWorker, Link


@dataclass(slots=True)
class _Line:
    """A host's link in one direction, and the time when it will have carried everything given to it."""

    seconds_per_byte: float
    latency_seconds: float
    free_at: float = 0.0


@final
class _Port:
    """A host's link in both directions; without a link, messages take no time."""

    def __init__(self, link: Link | None) -> None:
        costs = (0.0, 0.0) if link is None else (8 / link.bits_per_second, link.latency_seconds)
        self.free = link is None
        self.outward, self.inward = _Line(*costs), _Line(*costs)


@final
class Network:
    """Times of messages over the links of a cluster.

    In each direction a link carries messages one after another, in the order in which the host's workers sent them. A
    message goes through the sender's and the receiver's link simultaneously, each at its own pace, and arrives when the
    later of the two has carried it; the latencies of both add up. Within a host, and between hosts without a link,
    messages take no time.

    Args:
        cluster: The workers, servers, hosts and links.
        message_bytes: The size of one worker's gradients, and of the weights.
        servers: The number of servers that share them.
        narrowing: The part of the bytes that travels, unless whole weights have to.

    Attributes:
        free: Whether messages to and from servers take no time.
        shard_bytes: The part of a message for each server, in bytes, as it travels.
    """

    def __init__(self, cluster: Cluster, *, message_bytes: float, servers: int = 1, narrowing: float = 1.0) -> None:
        self._bytes = message_bytes
        self._slots = [_slot(worker, number) for number, worker in enumerate(cluster.workers)]
        self._links = [worker.link if worker.host is None else worker.host.link for worker in cluster.workers]
        ports: dict[Hashable, _Port] = {}
        own = [ports.setdefault(slot, _Port(link)) for slot, link in zip(self._slots, self._links, strict=True)]
        shards: list[tuple[str | None, _Port]] = [(None, _Port(None))] * servers
        if cluster.servers:
            hosts = [cluster.servers[number % len(cluster.servers)] for number in range(servers)]
            shards = [(host.name, ports.setdefault(host.name, _Port(host.link))) for host in hosts]
        self._whole_bytes = message_bytes / servers
        self.shard_bytes = narrowing * self._whole_bytes
        # By worker: the ports of its messages, one pair for each server that they reach over a network.
        routes = [
            [(port, shard) for at, shard in shards if not (port.free and shard.free) and (at is None or at != slot)]
            for slot, port in zip(self._slots, own, strict=True)
        ]
        self._pushes = [[(port.outward, shard.inward) for port, shard in each] for each in routes]
        self._pulls = [[(shard.outward, port.inward) for port, shard in each] for each in routes]
        self.free = not any(routes)

    def push_arrives(self, worker: int, now: float) -> float:
        """The time when a push sent now has reached all servers."""
        size = self.shard_bytes
        return max([_carry(sender, receiver, size, now) for sender, receiver in self._pushes[worker]], default=now)

    def pull_arrives(self, worker: int, now: float, *, whole: bool = False) -> float:
        """The time when the weights that all servers send now, or differences from others, have reached the worker."""
        size = self._whole_bytes if whole else self.shard_bytes
        return max([_carry(sender, receiver, size, now) for sender, receiver in self._pulls[worker]], default=now)

    def all_reduce_seconds(
        self, kind: Literal["ring", "tree"], *, by_host: bool = False, narrowing: float = 1.0
    ) -> float:
        """The seconds in which all workers sum their gradients, after the last of them is ready.

        A ring passes through each host once: 2 (n - 1) steps with 1/n of the bytes each, at the pace of the slowest
        link, where n is the number of workers, or of hosts if these sum `by_host` first. A tree of hosts sums on the
        way up and passes the sum down: 2 ceil(log2 hosts) steps with all bytes. The part `narrowing` of them travels.
        """
        hosts = len(set(self._slots))
        links = [link for link in self._links if link is not None]
        if hosts < 2 or not links:
            return 0.0
        seconds_per_byte = max(8 / link.bits_per_second for link in links)
        seconds = self._bytes * narrowing * seconds_per_byte
        if kind == "ring":
            members = hosts if by_host else len(self._slots)
            return 2 * (members - 1) * (seconds / members + self._hop_seconds())
        return 2 * math.ceil(math.log2(hosts)) * (seconds + self._hop_seconds())

    def small_exchange_seconds(self) -> float:
        """The seconds in which each worker sends a few bytes to all others."""
        hosts = len(set(self._slots))
        return 2 * math.ceil(math.log2(hosts)) * self._hop_seconds() if hosts > 1 else 0.0

    def _hop_seconds(self) -> float:
        """The largest latency between two hosts."""
        latencies = {
            slot: link.latency_seconds for slot, link in zip(self._slots, self._links, strict=True) if link is not None
        }
        return sum(sorted(latencies.values())[-2:])


def _slot(worker: ClusterWorker, number: int) -> Hashable:
    """A key that is equal for workers on the same host; all workers with neither host nor link share one."""
    if worker.link is not None:
        return number
    return None if worker.host is None else worker.host.name


def _carry(sender: _Line, receiver: _Line, size: float, now: float) -> float:
    """Give a message of `size` bytes to both links; return the time of its arrival."""
    sender.free_at = max(now, sender.free_at) + size * sender.seconds_per_byte
    # Starting now, not when the sender's link comes to it, or one slow host would hold up all others.
    receiver.free_at = max(now, receiver.free_at) + size * receiver.seconds_per_byte
    return max(sender.free_at, receiver.free_at) + (sender.latency_seconds + receiver.latency_seconds)
