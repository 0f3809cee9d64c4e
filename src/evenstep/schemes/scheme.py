"""A scheme: one answer to each question, and what does not go together."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final, Literal, final

from evenstep.core.errors import ConfigError
from evenstep.core.load.base import Load, LoadPolicy
from evenstep.core.load.compared import ComparedPolicy
from evenstep.core.samples import WEIGHTINGS
from evenstep.core.sync import Barrier, Sync
from evenstep.core.sync.rate import RATES

MAX_SERVERS: Final = 128
"""Of one run; they are processes of one host."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What is to be said of a run on parameter servers beside its scheme's answers.

    Attributes:
        servers: Server processes, each with a part of the parameters.
        rate: How the learning rate and the momentum of a commit follow from its share of the global batch: a name of
            `evenstep.core.sync.rate.RATES`.
        clip: The largest norm of a commit's gradient over all parameters; a larger one is scaled down. None: any.
        nonfinite: What becomes of a push that holds a NaN or an infinity: `skip` leaves it out and counts it, `refuse`
            ends its worker with an error.
        exchange: `blocking` waits for the new weights in `optimizer.step()`; `overlapped` computes the next iteration
            on the weights at hand meanwhile, so on weights that lack one more of its own pushes.
        push_to: `root`: every worker to the servers that hold the parameters. `group`: workers of other hosts than
            theirs to a server of their group, which passes on one gradient for all.

    Raises:
        ConfigError: A value is out of range.
    """

    servers: int = 1
    rate: str = "share"
    clip: float | None = None
    nonfinite: Literal["skip", "refuse"] = "skip"
    exchange: Literal["blocking", "overlapped"] = "blocking"
    push_to: Literal["root", "group"] = "root"

    def __post_init__(self) -> None:
        if not 1 <= self.servers <= MAX_SERVERS:
            raise ConfigError(f"{self.servers} servers cannot hold the parameters: use 1 to {MAX_SERVERS}")
        one_of("rate", self.rate, RATES)
        one_of("nonfinite", self.nonfinite, ("skip", "refuse"))
        one_of("exchange", self.exchange, ("blocking", "overlapped"))
        one_of("push_to", self.push_to, ("root", "group"))
        if self.clip is not None and not 0 < self.clip < float("inf"):
            raise ConfigError(f"a gradient's norm cannot be clipped to {self.clip}: use a positive number")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """One answer to each question: *how much* (`load`) and *how far ahead* (`sync`), everyone with everyone.

    Attributes:
        name: The scheme string that makes the same scheme.
        load: How much each worker computes before the next synchronisation.
        sync: How far ahead a worker may run before it waits for the others.
        served: The run's parameter servers; None where workers sum gradients among themselves, behind a barrier.
        period: None: gradients are summed in every iteration. A number: each worker trains alone for so many
            iterations, then the parameters are averaged.
        weighting: `samples`: a worker counts by its samples, x_i / X, which is the mathematics of one process; `mean`:
            all workers count alike, whatever their sizes.
        exchange: When the workers tell each other their speeds: `overlapped` with the communication of the gradients,
            or `blocking`, after it, when every worker's waiting is over.
        micro_batch: The fixed shape of what a worker computes on at once, in samples; its size is a number of these.
            None: its whole batch at once.
        compare: Whether a few iterations have equal sizes, so that what other sizes gain is measured; without servers.

    Raises:
        ConfigError: The parts do not go together.
    """

    name: str
    load: Load
    sync: Sync = field(default_factory=Barrier)
    served: Served | None = None
    period: int | None = None
    weighting: Literal["samples", "mean"] = "samples"
    exchange: Literal["overlapped", "blocking"] = "overlapped"
    micro_batch: int | None = None
    compare: bool = False

    def __post_init__(self) -> None:
        one_of("weighting", self.weighting, WEIGHTINGS)
        one_of("exchange", self.exchange, ("overlapped", "blocking"))
        if self.period is not None:
            self._require_local()
        if self.served is not None:
            self._require_servable(self.served)
        elif self.sync != Barrier():
            raise ConfigError("workers that run ahead of each other need parameter servers: give served=Served()")
        if self.micro_batch is not None and self.micro_batch < 1:
            raise ConfigError(f"a micro-batch of {self.micro_batch} samples is not possible: use 1 or more")
        if self.micro_batch is not None and self.load.multiple % self.micro_batch:
            raise ConfigError(
                f"sizes in multiples of {self.load.multiple} cannot be cut into micro-batches of {self.micro_batch}:"
                " leave out one of them"
            )

    def _require_local(self) -> None:
        """What does not go together with workers that train alone between two averages."""
        if self.period is not None and self.period < 1:
            raise ConfigError(f"a period of {self.period} iterations is not possible: use 1 or more")
        if self.micro_batch is not None:
            raise ConfigError(
                "local_sgd takes a step on every batch, so there is nothing to accumulate: leave out micro_batch, or"
                " use lb_bsp or dbs with it"
            )
        if self.exchange != "overlapped":
            raise ConfigError("local_sgd exchanges speeds with its averages: leave out exchange")

    def _require_servable(self, served: Served) -> None:
        """What does not go together on parameter servers."""
        if self.period is not None or self.micro_batch is not None or self.exchange != "overlapped":
            raise ConfigError(
                f"the servers of {self.name!r} take a push from every batch and its speed with it: leave out period,"
                " micro_batch and the exchange of speeds"
            )
        if self.weighting != "samples":
            raise ConfigError(f"the servers of {self.name!r} weigh by samples: leave out weighting")
        if self.sync.in_step and served.exchange == "overlapped":
            raise ConfigError(
                "a barrier leaves nothing to compute on while it is waited for: leave out exchange=overlapped, or use"
                " ssp, dssp or asp"
            )
        if self.sync.in_step and served.clip is not None and served.servers > 1:
            raise ConfigError(
                "no server sees the whole of a sum of several workers' gradients: clip with one server, or without a"
                " barrier"
            )

    def policy(self, workers: int) -> LoadPolicy:
        """A new policy that decides the sizes of so many workers, where they meet without servers."""
        policy = self.load.policy(workers)
        return ComparedPolicy(policy) if self.compare else policy

    def __str__(self) -> str:
        return self.name


def one_of(parameter: str, value: str, known: Collection[str]) -> None:
    """Check a parameter that is one of a few words.

    Raises:
        ConfigError: It is another.
    """
    if value not in known:
        *others, last = known
        raise ConfigError(f"{parameter} cannot be {value!r}: use {', '.join(others)} or {last}")
