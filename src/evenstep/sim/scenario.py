"""What is simulated: a cluster, a scheme, and how much of what they train."""

from dataclasses import dataclass
from typing import Final, Literal, final

import numpy as np

from evenstep.cluster import Cluster
from evenstep.core.errors import ConfigError
from evenstep.core.groups import Groups
from evenstep.core.samples import Ledger
from evenstep.core.sync import Sync
from evenstep.core.values import UNLIMITED, IntArray, Problem
from evenstep.schemes import Scheme, group_servers, placed

_LARGEST: Final = 2**62


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A training run to be simulated.

    Attributes:
        cluster: Its workers, each with a device; its network; who comes and goes.
        scheme: Under which they train.
        global_batch_size: The samples of one iteration over all workers.
        iterations: How long the run is, in global batches (slices of the epochs, of which the last of each may be
            short); without a barrier as many samples as those have.
        epoch_samples: The samples of an epoch; None: the run is one epoch.
        drop_last: Leave out a last slice that is shorter than the others.
        smallest_batch: The fewest samples that a worker can compute on, unless the scheme says; 2 with BatchNorm.
        message_bytes: What a worker's gradients take on the network; None where it costs nothing.
        exchange_seconds: What each exchange takes beside the network; fitted on a real run, or 0.
        exchange_spread: Relative standard deviation of that with servers, anew in each exchange; drawn by the cluster's
            seed. Without any, ties between equal workers are all decided alike, as in no real run.
        all_reduce: How workers without servers sum gradients.
        ahead: How many claims workers of servers hold beside the one in hand; None: as a run without data workers, 1
            where exchanges overlap with compute and 0 elsewhere.

    Raises:
        ConfigError: It cannot be simulated; one sentence that says what to change.
    """

    cluster: Cluster
    scheme: Scheme
    global_batch_size: int
    iterations: int
    epoch_samples: int | None = None
    drop_last: bool = False
    smallest_batch: int = 1
    message_bytes: int | None = None
    exchange_seconds: float = 0.0
    exchange_spread: float = 0.0
    all_reduce: Literal["ring", "tree"] = "ring"
    ahead: int | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be simulated."""
        self._require_types()
        if self.iterations < 1:
            raise ConfigError(f"a run of {self.iterations} iterations has nothing to simulate: use 1 or more")
        if self.global_batch_size < 1:
            raise ConfigError(f"the global batch size must be at least 1, not {self.global_batch_size}")
        self.ledger()  # Refuses an epoch without a sample.
        if not 0.0 <= self.exchange_seconds < float("inf"):
            raise ConfigError(f"an exchange cannot take {self.exchange_seconds} seconds: use 0 or more")
        if not 0.0 <= self.exchange_spread < float("inf"):
            raise ConfigError(f"exchanges cannot be spread by {self.exchange_spread}: use 0 or more")
        if self.all_reduce not in ("ring", "tree"):
            raise ConfigError(f"there is no all-reduce {self.all_reduce!r}: use ring or tree")
        if self.ahead is not None and self.ahead < 0:
            raise ConfigError(f"workers cannot hold {self.ahead} claims ahead: use 0 or more")
        self._require_workers()
        self._require_network()
        self._require_samples()
        # Refuse what cannot be shared out or grouped.
        count = len(self.cluster)
        self.scheme.load.policy(count).allocate(self.problem)
        self.sync.policy(count)

    def _require_types(self) -> None:
        if not isinstance(self.scheme, Scheme):
            raise ConfigError(f"a scenario needs a scheme and not its name: give parse_scheme({self.scheme!r})")
        for name in ("iterations", "global_batch_size", "epoch_samples", "smallest_batch", "message_bytes"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, int | np.integer):
                raise ConfigError(f"{name} must be a whole number, not {value!r}")

    def _require_samples(self) -> None:
        count, minimum = len(self.cluster), self._minimum
        if minimum < 1:
            raise ConfigError(f"a smallest batch of {minimum} samples is not possible: use 1 or more")
        if self.global_batch_size < count * minimum:
            raise ConfigError(
                f"the global batch size {self.global_batch_size} is less than {count} workers with at least {minimum}"
                f" sample{'s' if minimum > 1 else ''} each: raise the batch size"
            )
        if self.global_batch_size > _LARGEST:
            raise ConfigError(f"the global batch size must be at most {_LARGEST}, not {self.global_batch_size}")

    @property
    def sync(self) -> Sync:
        """The scheme's, with the groups of these hosts where it asks for them."""
        return placed(self.scheme, self._hosts).sync

    @property
    def group_servers(self) -> Groups:
        """The groups that have a server of their own, on their host."""
        servers = self.cluster.servers
        return group_servers(placed(self.scheme, self._hosts), self._hosts, root=servers[0].name if servers else None)

    @property
    def _hosts(self) -> list[str]:
        """Of each worker; one that is on none is by itself."""
        return [
            f"worker {number}" if worker.host is None else worker.host.name
            for number, worker in enumerate(self.cluster.workers)
        ]

    def _require_workers(self) -> None:
        for number, worker in enumerate(self.cluster.workers):
            if worker.device is None:
                raise ConfigError(
                    f"worker {number} has no device, so nothing tells how long it computes: add device = ... to its"
                    " [[workers]] in the cluster file, with a [devices.NAME]"
                )
            if worker.spot is not None and self.scheme.served is None:
                raise ConfigError(
                    f"worker {number} comes and goes, and a run under {self.scheme.name!r} ends with the first worker"
                    " that leaves: use a scheme on servers, such as asp, ssp, dssp or bsp:engine=server"
                )

    def _require_network(self) -> None:
        cluster = self.cluster
        linked = any(
            each.link is not None
            for each in (*cluster.workers, *(worker.host for worker in cluster.workers), *cluster.servers)
            if each is not None
        )
        if linked and self.message_bytes is None:
            raise ConfigError(
                "the cluster has links, and nothing tells how much goes over them: say how large the gradients are"
                ' (--gradients "100 MB")'
            )
        if self.message_bytes is not None and self.message_bytes < 0:
            raise ConfigError(f"gradients cannot take {self.message_bytes} bytes: use 0 or more")

    @property
    def _minimum(self) -> int:
        return self.smallest_batch if self.scheme.load.minimum is None else self.scheme.load.minimum

    @property
    def length(self) -> int:
        """The samples of an epoch."""
        return self.iterations * self.global_batch_size if self.epoch_samples is None else self.epoch_samples

    def ledger(self) -> Ledger:
        """A new epoch's."""
        return Ledger(length=self.length, global_batch_size=self.global_batch_size, drop_last=self.drop_last)

    @property
    def samples(self) -> int:
        """The samples of the whole run."""
        ledger = self.ledger()
        epochs, rest = divmod(self.iterations, ledger.iterations)
        of_epoch = min(ledger.iterations * self.global_batch_size, self.length)
        return epochs * of_epoch + min(rest * self.global_batch_size, of_epoch)

    @property
    def limits(self) -> IntArray:
        """What the sizes never exceed, as far as it is known beforehand; int64 of shape [workers]."""
        load, count = self.scheme.load, len(self.cluster)
        # A worker that computes on micro-batches can be given any number of them.
        known = [UNLIMITED if self.scheme.micro_batch else self.cluster.largest_batch(each) for each in range(count)]
        limits = np.array(known, dtype=np.int64)
        return limits if load.maximum is None else np.minimum(limits, load.maximum)

    @property
    def problem(self) -> Problem:
        """What the sizes must satisfy to begin with."""
        return Problem(
            global_batch_size=self.global_batch_size,
            minimum=np.full(len(self.cluster), self._minimum, dtype=np.int64),
            maximum=self.limits,
            multiple=self.scheme.load.multiple,
        )
