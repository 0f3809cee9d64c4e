"""A scenario to simulate: a cluster, a scheme, and the length of the training."""

from dataclasses import dataclass
from typing import Annotated, Final, Literal, final

import numpy as np

from evenstep.cluster import Cluster
from evenstep.cluster.record import FROM_ONE, NOT_NEGATIVE, WHOLE, Number, require_ranges
from evenstep.core.errors import ConfigError
from evenstep.core.groups import Groups
from evenstep.core.load import Static
from evenstep.core.load.checked import load_policy
from evenstep.core.load.limits import smallest_batch
from evenstep.core.samples import Ledger
from evenstep.core.sync import Sync
from evenstep.core.sync.checked import sync_policy
from evenstep.core.values import UNLIMITED, IntArray, Problem
from evenstep.schemes import Scheme, group_servers, in_batches, placed
from evenstep.schemes.costs import require_costs
from evenstep.sim.costs import CostsOfSamples, SampleCosts

_BATCH: Final = Number(whole=True, least=1, most=2**62)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A training run to simulate.

    Attributes:
        cluster: The workers, each with a device; the network; the times at which workers are present.
        scheme: The scheme under which they train.
        global_batch_size: The samples of one iteration over all workers.
        iterations: The length of the run in global batches (slices of the epochs; the last of an epoch may be short);
            without a barrier the run has the same number of samples.
        epoch_samples: The samples of an epoch; None: the run is one epoch.
        drop_last: Leave out a last slice that is shorter than the others.
        message_bytes: The size of a worker's gradients on the network; None: communication costs nothing.
        exchange_seconds: The time of each exchange besides the network; fitted on a real run, or 0.
        exchange_spread: Relative standard deviation of that time with servers, drawn for each exchange from the
            cluster's seed. With 0, ties between equal workers are always decided alike, unlike in any real run.
        all_reduce: How workers without servers sum gradients.
        ahead: The number of claims that workers on servers hold besides the current one; None: as in a run without data
            workers, 1 if exchanges overlap with compute, else 0.
        costs: The costs of samples if they differ: a distribution, or the cost of each sample of a dataset, of which
            each epoch has as many as it needs in its own order. A device's time is that of a batch of average samples
            with the same cost. None: all cost alike.
        by_cost: Whether the workers know the costs, as in a run with `cost=`; sizes then count average samples.

    Raises:
        ConfigError: The scenario cannot be simulated; one sentence that says what to change.
    """

    cluster: Cluster
    scheme: Scheme
    global_batch_size: Annotated[int, _BATCH]
    iterations: Annotated[int, FROM_ONE]
    epoch_samples: Annotated[int | None, FROM_ONE] = None
    drop_last: bool = False
    message_bytes: Annotated[int | None, WHOLE] = None
    exchange_seconds: Annotated[float, NOT_NEGATIVE] = 0.0
    exchange_spread: Annotated[float, NOT_NEGATIVE] = 0.0
    all_reduce: Literal["ring", "tree"] = "ring"
    ahead: Annotated[int | None, WHOLE] = None
    costs: CostsOfSamples | None = None
    by_cost: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.scheme, Scheme):
            raise ConfigError(f"a scenario needs a scheme and not its name: give parse_scheme({self.scheme!r})")
        require_ranges(self)
        if self.scheme.counts_periods and self.scheme.micro_batch is None:
            self._count_in_periods(self.scheme.batches_in_iteration)
        if self.all_reduce not in ("ring", "tree"):
            raise ConfigError(f"there is no all-reduce {self.all_reduce!r}: use ring or tree")
        self.ledger()  # Raises for an epoch without a slice.
        if self.costs is not None:
            if self.by_cost:
                require_costs(self.scheme)
            self.sample_costs()  # Raises for invalid costs.
        self._require_workers()
        self._require_network()
        if isinstance(self.scheme.load, Static):
            self.scheme.load.require(len(self.cluster), self.global_batch_size)
        count, minimum = len(self.cluster), self._minimum
        if self.global_batch_size < count * minimum:
            raise ConfigError(
                f"the global batch size {self.global_batch_size} is less than {count} workers with at least {minimum}"
                f" sample{'s' if minimum > 1 else ''} each: raise the batch size"
            )
        # Raise for a batch that cannot be divided, and for impossible groups.
        load_policy(self.scheme.load, count).allocate(self.problem)
        sync_policy(self.sync, count)

    def _count_in_periods(self, batches: int) -> None:
        """Make an iteration of all steps of a period, as the runtime does."""
        size, rest = divmod(self.global_batch_size, len(self.cluster))
        if rest:
            raise ConfigError(
                f"{len(self.cluster)} workers cannot have batches of one size from {self.global_batch_size} samples:"
                " give a multiple of the number of workers as the global batch size"
            )
        object.__setattr__(self, "scheme", in_batches(self.scheme, size))
        object.__setattr__(self, "global_batch_size", batches * self.global_batch_size)
        object.__setattr__(self, "iterations", -(-self.iterations // batches))

    @property
    def sync(self) -> Sync:
        """The scheme's sync, with the groups of these hosts if it groups by host."""
        return placed(self.scheme, self._hosts).sync

    @property
    def group_servers(self) -> Groups:
        """The groups with a server on their host."""
        servers = self.cluster.servers
        return group_servers(placed(self.scheme, self._hosts), self._hosts, root=servers[0].name if servers else None)

    @property
    def _hosts(self) -> list[str]:
        """The host of each worker; a worker without one is on a host by itself."""
        return [
            f"worker {number}" if worker.host is None else worker.host.name
            for number, worker in enumerate(self.cluster.workers)
        ]

    def _require_workers(self) -> None:
        for number, worker in enumerate(self.cluster.workers):
            if worker.device is None:
                raise ConfigError(
                    f"worker {number} has no device, so its compute time is unknown: add device = ... to its"
                    " [[workers]] in the cluster file, with a [devices.NAME]"
                )
            if worker.spot is not None and self.scheme.served is None:
                raise ConfigError(
                    f"worker {number} comes and goes, and a run under {self.scheme.name!r} ends with the first worker"
                    " that leaves: use a scheme on servers, such as asp, ssp, dssp or bsp:engine=server"
                )

    def _require_network(self) -> None:
        cluster = self.cluster
        ends = (*cluster.workers, *(worker.host for worker in cluster.workers), *cluster.servers)
        if any(each is not None and each.link is not None for each in ends) and self.message_bytes is None:
            raise ConfigError(
                "the cluster has links, and the size of the gradients on them is unknown: say how large the gradients"
                ' are (gradients = "100 MB" in the file, or --gradients)'
            )

    @property
    def _minimum(self) -> int:
        return smallest_batch(self.scheme.load, self.global_batch_size, self.limits)

    @property
    def length(self) -> int:
        """The samples of an epoch."""
        return self.iterations * self.global_batch_size if self.epoch_samples is None else self.epoch_samples

    def ledger(self) -> Ledger:
        """The ledger of a new epoch."""
        return Ledger(length=self.length, global_batch_size=self.global_batch_size, drop_last=self.drop_last)

    @property
    def samples(self) -> int:
        """The samples of the whole run."""
        ledger = self.ledger()
        epochs, rest = divmod(self.iterations, ledger.iterations)
        of_epoch = min(ledger.iterations * self.global_batch_size, self.length)
        return epochs * of_epoch + min(rest * self.global_batch_size, of_epoch)

    @property
    def told_costs(self) -> bool:
        """True if samples differ in cost and the workers know the costs."""
        return self.costs is not None and self.by_cost

    @property
    def uses_reports(self) -> bool:
        """True if sizes may depend on the workers' reports."""
        learned = any(each.device is not None and each.device.memory is not None for each in self.cluster.workers)
        return learned or self.told_costs or self.scheme.load.follows_speed

    def sample_costs(self) -> SampleCosts | None:
        """The costs of the samples; None if all cost alike."""
        return None if self.costs is None else SampleCosts(self.costs, self.length, self.cluster.seed)

    @property
    def limits(self) -> IntArray:
        """The upper limits of sizes that are known beforehand; int64 of shape [workers]."""
        load, count = self.scheme.load, len(self.cluster)
        # With micro-batches, a worker can get any number of them.
        known = [UNLIMITED if self.scheme.micro_batch else self.cluster.largest_batch(each) for each in range(count)]
        limits = np.array(known, dtype=np.int64)
        return limits if load.maximum is None else np.minimum(limits, load.maximum)

    @property
    def problem(self) -> Problem:
        """The initial conditions for the sizes."""
        return Problem(
            global_batch_size=self.global_batch_size,
            minimum=np.full(len(self.cluster), self._minimum, dtype=np.int64),
            maximum=self.limits,
            multiple=self.scheme.load.multiple if self.costs is None else 1,
        )
