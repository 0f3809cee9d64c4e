"""What communication costs: sums over all workers, and messages to and from servers that share links."""

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, Literal, final

from evenstep.cluster import Cluster, ClusterWorker, Host, Link

_BITS: Final = 8


@dataclass(slots=True)
class _Line:
    """A host's link in one direction, and when it has carried all that was given to it."""

    seconds_per_byte: float
    latency_seconds: float
    free_at: float = 0.0


@dataclass(frozen=True, slots=True)
class _Port:
    """A host's link in both directions."""

    outward: _Line
    inward: _Line


@final
class Network:
    """Times of messages over the links of a cluster.

    In each direction a link carries messages one after another, in the order in which they were sent; what a host's
    workers send waits for each other there. A message goes through the sender's link and the receiver's at once, each
    at its own pace, and has arrived when the later of the two has carried it; the latencies of both add up. Within a
    host, and over hosts without a link, messages take no time.

    Args:
        cluster: Its workers, servers, hosts and links.
        message_bytes: What one worker's gradients, or the weights, take altogether.
        servers: How many servers share them.

    Attributes:
        free: No message to or from a server takes any time.
        shard_bytes: What goes to each server.
    """

    def __init__(self, cluster: Cluster, *, message_bytes: int, servers: int = 1) -> None:
        self._bytes = message_bytes
        self._slots = [_slot(worker, number) for number, worker in enumerate(cluster.workers)]
        self._links = [_link_of(worker) for worker in cluster.workers]
        ports: dict[Hashable, _Port | None] = {}
        own: list[_Port | None] = []
        for slot, link in zip(self._slots, self._links, strict=True):
            if slot not in ports:
                ports[slot] = _port(link)
            own.append(ports[slot])
        hosts: list[Host | None] = [
            cluster.servers[number % len(cluster.servers)] if cluster.servers else None for number in range(servers)
        ]
        shards = []
        for host in hosts:
            slot = None if host is None else host.name
            if host is not None and slot not in ports:
                ports[slot] = _port(host.link)
            shards.append((slot, None if host is None else ports[slot]))
        self.shard_bytes = message_bytes / servers
        # By worker: the links of its messages, one for each server that they must go over a network to.
        routes = [
            [(port, shard) for at, shard in shards if (port or shard) and (at is None or at != slot)]
            for slot, port in zip(self._slots, own, strict=True)
        ]
        self._pushes = [[(_outward(port), _inward(shard)) for port, shard in each] for each in routes]
        self._pulls = [[(_outward(shard), _inward(port)) for port, shard in each] for each in routes]
        self.free = not any(routes)

    def push_arrives(self, worker: int, now: float) -> float:
        """When a push that is sent now has reached all servers."""
        size = self.shard_bytes
        return max([_carry(sender, receiver, size, now) for sender, receiver in self._pushes[worker]], default=now)

    def pull_arrives(self, worker: int, now: float) -> float:
        """When the weights that all servers send now have reached the worker."""
        size = self.shard_bytes
        return max([_carry(sender, receiver, size, now) for sender, receiver in self._pulls[worker]], default=now)

    def all_reduce_seconds(self, kind: Literal["ring", "tree"]) -> float:
        """How long it takes all workers to sum their gradients, from when the last of them is ready.

        A ring passes through each host once: 2 (n - 1) steps with 1/n of the bytes each, at the pace of the slowest
        link. A tree of the hosts sums on the way up and passes the sum on on the way down: 2 ceil(log2 hosts) steps
        with all of the bytes.
        """
        hosts = len(set(self._slots))
        links = [link for link in self._links if link is not None]
        if hosts < 2 or not links:
            return 0.0
        seconds_per_byte = max(_BITS / link.bits_per_second for link in links)
        if kind == "ring":
            workers = len(self._slots)
            return 2 * (workers - 1) * (self._bytes / workers * seconds_per_byte + self._hop_seconds())
        return 2 * math.ceil(math.log2(hosts)) * (self._bytes * seconds_per_byte + self._hop_seconds())

    def small_exchange_seconds(self) -> float:
        """How long it takes all workers to tell all others a few bytes."""
        hosts = len(set(self._slots))
        return 2 * math.ceil(math.log2(hosts)) * self._hop_seconds() if hosts > 1 else 0.0

    def _hop_seconds(self) -> float:
        """The largest latency between two hosts."""
        latencies = {
            slot: link.latency_seconds for slot, link in zip(self._slots, self._links, strict=True) if link is not None
        }
        return sum(sorted(latencies.values())[-2:])


def _slot(worker: ClusterWorker, number: int) -> Hashable:
    """What is the same for workers on the same host; who has neither host nor link is together with all such."""
    if worker.link is not None:
        return number
    return None if worker.host is None else worker.host.name


def _link_of(worker: ClusterWorker) -> Link | None:
    return worker.link if worker.host is None else worker.host.link


def _port(link: Link | None) -> _Port | None:
    if link is None:
        return None
    pace = _BITS / link.bits_per_second
    return _Port(outward=_Line(pace, link.latency_seconds), inward=_Line(pace, link.latency_seconds))


def _outward(port: _Port | None) -> _Line | None:
    return None if port is None else port.outward


def _inward(port: _Port | None) -> _Line | None:
    return None if port is None else port.inward


def _carry(sender: _Line | None, receiver: _Line | None, size: float, now: float) -> float:
    """Give a message of that many bytes to both links; when it has arrived."""
    arrives = now
    latency = 0.0
    if sender is not None:
        arrives = sender.free_at = max(now, sender.free_at) + size * sender.seconds_per_byte
        latency = sender.latency_seconds
    if receiver is not None:
        # From now on and not from when the sender's link comes to it, or one slow host would hold up all others.
        receiver.free_at = max(now, receiver.free_at) + size * receiver.seconds_per_byte
        arrives = max(arrives, receiver.free_at)
        latency += receiver.latency_seconds
    return arrives + latency
