"""A cluster: its workers, their devices, hosts, links and disturbances, for real runs and for simulated ones."""

from dataclasses import dataclass
from typing import Annotated, final

from evenstep.cluster.costs import CostDistribution
from evenstep.cluster.record import BANDWIDTH, DURATION, NOT_NEGATIVE, POSITIVE, Listed, Named, require_ranges
from evenstep.cluster.slowness import Chain, Device, Disturbance, PerWorker
from evenstep.cluster.spot import Spot
from evenstep.core.errors import ConfigError
from evenstep.core.values import UNLIMITED


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A network link: `bits_per_second` > 0 in each direction, and `latency_seconds` >= 0 one way."""

    name: str
    bits_per_second: Annotated[float, "bandwidth", BANDWIDTH, POSITIVE]
    latency_seconds: Annotated[float, "latency", DURATION, NOT_NEGATIVE] = 0.0

    def __post_init__(self) -> None:
        require_ranges(self)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine, and its link to the others; None: a network that costs nothing."""

    name: str
    link: Annotated[Link | None, Named("links")] = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterWorker:
    """One worker.

    Attributes:
        device: The emulated device; None: the real one.
        host: Its host; None: not known.
        link: Its link, if it has an unnamed host to itself; else None.
        disturbances: Its disturbances, in the order of application.
        spot: When it is there, in virtual time only; None: always.

    Raises:
        ConfigError: It has both a host and a link.
    """

    device: Annotated[Device | None, Named("devices")] = None
    host: Annotated[Host | None, Named("hosts")] = None
    link: Annotated[Link | None, Named("links")] = None
    disturbances: Annotated[tuple[Disturbance, ...], "disturb", Listed(Named("disturbances"))] = ()
    spot: Annotated[Spot | None, Named("spots")] = None

    def __post_init__(self) -> None:
        if self.host is not None and self.link is not None:
            raise ConfigError("the key 'link' is for a worker that shares no host: remove it, or 'host'")

    def disturbance(self) -> Disturbance:
        """The device, then the disturbances on top of each other."""
        return Chain(parts=self.disturbances if self.device is None else (self.device, *self.disturbances))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The workers, in the order of their ids, and all hosts and links that the file defines.

    `servers` are the hosts of the parameter servers: server i runs on host i modulo their number. Empty: each server is
    on a further host, whose network costs nothing. `gradient_bytes` is the size of the gradients of the model that
    trains on it; None: not known. `costs`: how its samples differ in cost, for the simulator; None: they do not.
    """

    workers: tuple[ClusterWorker, ...]
    hosts: tuple[Host, ...] = ()
    links: tuple[Link, ...] = ()
    servers: tuple[Host, ...] = ()
    seed: int = 0
    gradient_bytes: int | None = None
    costs: CostDistribution | None = None

    def __len__(self) -> int:
        """The number of workers."""
        return len(self.workers)

    def disturbance(self) -> Disturbance:
        """The compute time of each worker; ConfigError when asked for a worker beyond the last."""
        return PerWorker(parts_by_worker=tuple(worker.disturbance() for worker in self.workers))

    def largest_batch(self, worker: int) -> int:
        """The known largest batch of this worker's device, in samples; UNLIMITED if not known."""
        device = self.workers[worker].device
        return UNLIMITED if device is None else device.largest_batch
