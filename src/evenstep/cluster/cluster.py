"""The cluster file: one description of workers, devices, hosts, links and disturbances for all that need one.

A parser and the value that it makes. It reads no file and knows nothing of who runs the cluster, for real or in virtual
time.
"""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar, final

from evenstep.cluster.quantity import BANDWIDTH, DURATION
from evenstep.cluster.read_device import read_device
from evenstep.cluster.read_disturbance import read_disturbance
from evenstep.cluster.read_spot import read_spot
from evenstep.cluster.slowness.base import Disturbance
from evenstep.cluster.slowness.chain import Chain
from evenstep.cluster.slowness.device import Device
from evenstep.cluster.slowness.device_memory import DeviceMemory
from evenstep.cluster.slowness.draw import derive_seed, require_seed
from evenstep.cluster.slowness.per_worker import PerWorker
from evenstep.cluster.slowness.require import require_at_least, require_positive
from evenstep.cluster.slowness.undisturbed import Undisturbed
from evenstep.cluster.spot import Spot
from evenstep.cluster.table import Table, as_name, placed
from evenstep.core.errors import ConfigError
from evenstep.core.values import UNLIMITED

T = TypeVar("T")

_MAX_WORKERS: Final = 1_000_000


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A network link: `bits_per_second` > 0 in each direction, and `latency_seconds` >= 0 one way."""

    name: str
    bits_per_second: float
    latency_seconds: float = 0.0

    def __post_init__(self) -> None:
        """Refuse values outside their ranges."""
        require_positive("bandwidth", self.bits_per_second)
        require_at_least("latency", self.latency_seconds, 0)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine, and the link that joins it to the others; None: a network that costs nothing."""

    name: str
    link: Link | None = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterWorker:
    """One worker: its device (None: the real one), its host (None: not told) and what disturbs it, in this order.

    `link` is its own where it has a host to itself that needs no name; else None. `spot` says when it is there (None:
    always), which is heeded in virtual time alone.
    """

    device: Device | None = None
    host: Host | None = None
    link: Link | None = None
    disturbances: tuple[Disturbance, ...] = ()
    spot: Spot | None = None

    def disturbance(self) -> Disturbance:
        """The device, then the disturbances one upon the other; Undisturbed where there is none of them."""
        parts = self.disturbances if self.device is None else (self.device, *self.disturbances)
        return Chain(parts=parts) if parts else Undisturbed()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The workers, in the order of their ids, and the hosts and links that the file defines, used or not.

    `servers` are the hosts of parameter servers: server i stands on the i-th of them, after the last on the first
    again. Empty: on hosts of their own, whose network costs nothing.
    """

    workers: tuple[ClusterWorker, ...]
    hosts: tuple[Host, ...] = ()
    links: tuple[Link, ...] = ()
    servers: tuple[Host, ...] = ()
    seed: int = 0

    def __len__(self) -> int:
        """The number of workers."""
        return len(self.workers)

    def disturbance(self) -> Disturbance:
        """How long each worker's compute takes; ConfigError when asked for a worker beyond the last."""
        return PerWorker(parts_by_worker=tuple(worker.disturbance() for worker in self.workers))

    def largest_batch(self, worker: int) -> int:
        """The samples that this worker's device is said to hold; UNLIMITED where nothing is said."""
        device = self.workers[worker].device
        return UNLIMITED if device is None else device.largest_batch

    def memory(self, worker: int) -> DeviceMemory | None:
        """The memory of this worker's device, whose limit is to be learnt; None where nothing is said of it."""
        device = self.workers[worker].device
        return None if device is None else device.memory


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What a worker may name."""

    devices: Mapping[str, Device]
    hosts: Mapping[str, Host]
    disturbances: Mapping[str, Disturbance]
    links: Mapping[str, Link]
    spots: Mapping[str, Spot]


def parse_cluster(text: str, *, name: str = "cluster file") -> Cluster:
    """The cluster that a TOML text describes.

    * `seed` (0): draws every random disturbance; each draws by its own name, so one more leaves the others as they are.
    * `[devices.NAME]`: either `per_sample`, with `fixed` ("0 s") and `flat` (0: samples up to which the time does not
      grow), or `measured`, a built-in curve ("gtx1070-a", "gtx1070-b", "tesla-m40", "gtx750"), or `points`, a list such
      as `[[2, "30.5 ms"], [4, "46.8 ms"]]`. Beyond the largest measured batch the time follows the line through the
      points from `fit_from` (16) samples up. `largest_batch`: the samples that its memory is known to hold. Or `memory`
      and `memory_per_sample`, with `memory_fixed` ("0 MB"): a memory whose limit is to be learnt by trying.
    * `[links.NAME]`: `bandwidth`, `latency` ("0 s"). `[hosts.NAME]`: `link`.
    * `[[workers]]`: `device` (the real one), `host`, or `link` for a host of its own, `disturb` (a list of names,
      applied in this order), `spot`, `count` (1). Workers are numbered from 0 in the order of the file.
    * `[[servers]]`: `host`, `count` (1): where parameter servers stand, in this order, and over again where a scheme
      has more of them. Without any, they are reached over the workers' links alone.
    * `[spots.NAME]`: when a worker is there; in virtual time alone. Either `stays`, the mean length of a stay, and
      `away`, that of an absence (without it, who has left stays away), both drawn exponentially; or `recorded`, a list
      of stays such as `[["0 s", "90 s"], ["120 s", "400 s"]]`.
    * `[disturbances.NAME]`, by its `kind`: "constant" (`factor`, `extra` or both), "episodic" (`factor`, `period`,
      `shortest`, `longest`, in iterations), "from" (`factor`, `first`, and `until`, the iteration that is fast again),
      "jitter" (`spread`), "trace" (`factors`, one per iteration, repeating).

    Durations are in s, ms or us, bandwidths in Gbit/s or Mbit/s, memories in GB, MB or KB, a spread in %; all are texts
    in quotes.

    Args:
        text: The contents of the file.
        name: What error messages call the file.

    Raises:
        ConfigError: The text is not TOML, or does not describe a cluster; one sentence with the place in the file.

    >>> cluster = parse_cluster('''
    ...     [devices.fast]
    ...     fixed = "10 ms"
    ...     per_sample = "0.5 ms"
    ...     flat = 8
    ...     largest_batch = 169
    ...     [devices.old]
    ...     measured = "gtx750"
    ...     [links.lan]
    ...     bandwidth = "10 Gbit/s"
    ...     latency = "0.1 ms"
    ...     [hosts.node7]
    ...     link = "lan"
    ...     [disturbances.busy]
    ...     kind = "episodic"
    ...     factor = 3
    ...     period = 200
    ...     shortest = 10
    ...     longest = 50
    ...     [[workers]]
    ...     device = "fast"
    ...     host = "node7"
    ...     count = 3
    ...     [[workers]]
    ...     device = "old"
    ...     disturb = ["busy"]
    ... ''')
    >>> len(cluster), cluster.largest_batch(0), cluster.workers[0].host.link.latency_seconds
    (4, 169, 0.0001)
    >>> cluster.disturbance().seconds(worker=2, iteration=0, batch_size=2, natural_seconds=0.0, now=0.0)
    0.014
    """
    with placed(name):
        try:
            table = Table(entries=tomllib.loads(text))
        except ValueError as error:
            raise ConfigError(f"this is not valid TOML: {error}") from None
        except RecursionError:
            raise ConfigError("this is nested too deeply for a cluster file") from None
        return _read_cluster(table)


def _read_cluster(table: Table) -> Cluster:
    table.only(("seed", "devices", "links", "hosts", "disturbances", "spots", "workers", "servers"))
    seed = table.integer("seed", 0)
    require_seed(seed)
    links = table.each("links", _read_link)
    parts = _Parts(
        devices=table.each("devices", lambda _, entry: read_device(entry)),
        hosts=table.each("hosts", lambda name, entry: _read_host(name, entry, links)),
        disturbances=table.each(
            "disturbances", lambda name, entry: read_disturbance(entry, seed=derive_seed(seed, name))
        ),
        links=links,
        spots=table.each("spots", lambda name, entry: read_spot(entry, seed=derive_seed(seed, name))),
    )
    workers = _counted(table, "workers", lambda entry: _read_worker(entry, parts))
    if not workers:
        raise ConfigError("workers must hold at least one table [[workers]]")
    return Cluster(
        workers=workers,
        hosts=tuple(parts.hosts.values()),
        links=tuple(links.values()),
        servers=_counted(table, "servers", lambda entry: _read_server(entry, parts))
        if "servers" in table.entries
        else (),
        seed=seed,
    )


def _counted(table: Table, key: str, read: Callable[[Table], T]) -> tuple[T, ...]:
    """What `read` makes of each table of a list, as many times as its `count` says."""
    read_so_far: list[T] = []
    for number, item in enumerate(table.items(key), start=1):
        with placed(f"[[{key}]] number {number}"):
            entry = Table.of(item)
            value = read(entry)
            count = entry.integer("count", 1, least=1)
            # Checked before the tuple is made: a slip of the finger must not fill the memory.
            if count > _MAX_WORKERS - len(read_so_far):
                raise ConfigError(f"count must keep the cluster within {_MAX_WORKERS} {key}, not {count}")
            read_so_far += [value] * count
    return tuple(read_so_far)


def _read_link(name: str, table: Table) -> Link:
    table.only(("bandwidth", "latency"))
    return Link(
        name=name,
        bits_per_second=table.quantity("bandwidth", BANDWIDTH),
        latency_seconds=table.quantity("latency", DURATION, 0.0),
    )


def _read_host(name: str, table: Table, links: Mapping[str, Link]) -> Host:
    table.only(("link",))
    return Host(name=name, link=links[table.name("link", links)] if "link" in table.entries else None)


def _read_worker(table: Table, parts: _Parts) -> ClusterWorker:
    table.only(("device", "host", "link", "disturb", "spot", "count"))
    if "host" in table.entries and "link" in table.entries:
        raise ConfigError("the key 'link' is for a worker with a host of its own: remove it, or 'host'")
    return ClusterWorker(
        device=parts.devices[table.name("device", parts.devices)] if "device" in table.entries else None,
        host=parts.hosts[table.name("host", parts.hosts)] if "host" in table.entries else None,
        link=parts.links[table.name("link", parts.links)] if "link" in table.entries else None,
        disturbances=tuple(
            parts.disturbances[as_name("disturb", item, parts.disturbances)] for item in table.items("disturb", ())
        ),
        spot=parts.spots[table.name("spot", parts.spots)] if "spot" in table.entries else None,
    )


def _read_server(table: Table, parts: _Parts) -> Host:
    table.only(("host", "count"))
    return parts.hosts[table.name("host", parts.hosts)]
