"""A scheme: one answer to each question, and the checks that the answers go together."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Annotated, Final, Literal, TypeAlias, TypedDict, final

from evenstep.core.errors import ConfigError
from evenstep.core.groups import ByHost, ByRank, BySpeed, GivenGroups, by_host
from evenstep.core.load.base import Load, LoadPolicy
from evenstep.core.load.checked import load_policy
from evenstep.core.samples import WEIGHTINGS
from evenstep.core.shown import shown
from evenstep.core.sync import Barrier, Grouped, Sync
from evenstep.core.sync.rate import RATES
from evenstep.schemes.given_sizes import ByKey, text_of

MAX_SERVERS: Final = 128
"""The most servers of one run, all on one host."""


Rate: TypeAlias = Annotated[
    str,
    "How the learning rate and the momentum of a push follow from its share of the global batch and its staleness:"
    " `share`, or `raw` to leave them as they are, as papers do, which diverges with many workers.",
]
Clip: TypeAlias = Annotated[
    float | None,
    "The largest norm of a push's gradient over all parameters; a larger one is scaled down. `clip_grad_norm_` in the"
    " script would only see this worker's part of the batch.",
]
Nonfinite: TypeAlias = Annotated[
    Literal["skip", "refuse"],
    "`skip` leaves out a push with a NaN or an infinity and counts it; `refuse` ends its worker with an error.",
]
NonfiniteSum: TypeAlias = Annotated[
    Literal["skip", "refuse", "spread"],
    "What becomes of a worker whose gradient (with `local-sgd`, model) holds a NaN or an infinity, on PyTorch. `skip`"
    " leaves it out and counts it; `refuse` ends the worker with an error; `spread` gives it to all workers, as"
    " DistributedDataParallel does.",
]
Wire: TypeAlias = Annotated[
    Literal["float32", "bf16", "int8"],
    "The format in which gradients and changes of models travel. `bf16` halves the bytes, and `int8`, with a scale for"
    " each 256 values, quarters them; what rounding leaves out is added to the next. `float32` rounds nothing.",
]
WIRE_BLOCK: Final = 256
"""The number of values of an `int8` wire with a scale, a float32, in common."""
NARROWING: Final = MappingProxyType({"float32": 1.0, "bf16": 1 / 2, "int8": (1 + 4 / WIRE_BLOCK) / 4})
"""The bytes that travel for each byte of float32, by wire."""
PushExchange: TypeAlias = Annotated[
    Literal["blocking", "overlapped"],
    "`blocking` waits for the new weights in `optimizer.step()`; `overlapped` computes the next iteration meanwhile, on"
    " weights that lack one more of the worker's own pushes.",
]
ServerCount: TypeAlias = Annotated[int, "Server processes, 1 to 128, each with a part of the parameters."]
OptimizerName: TypeAlias = Annotated[
    str | None,
    "An optimizer class that the servers may run besides those of `torch.optim`, as `my_module:MyClass`.",
]
PushTo: TypeAlias = Annotated[
    Literal["root", "group"],
    "`root`: every worker pushes to the servers that hold the parameters. `group`: if `servers` is 1 and groups stay as"
    " they are, the workers of a group that are all on one host, other than worker 0's, push to a server of their group"
    " there, which passes on one gradient for all and fetches weights once.",
]


class ServerOptions(TypedDict, total=False):
    """The options of `Served` that every asynchronous recipe takes."""

    rate: Rate
    clip: Clip
    nonfinite: Nonfinite
    exchange: PushExchange
    wire: Wire
    servers: ServerCount
    optimizer: OptimizerName


LOCAL_STEPS: Final = MappingProxyType(
    {"period": None, "steps": "equal", "outer": "sgd", "outer_lr": 1.0, "outer_momentum": 0.9}
)
"""The defaults of the options of local steps between two pushes."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The options of a run on parameter servers, besides its scheme's answers; the annotations explain each.

    Raises:
        ConfigError: A value is out of range.
    """

    servers: ServerCount = 1
    rate: Rate = "share"
    clip: Clip = None
    nonfinite: Nonfinite = "skip"
    exchange: PushExchange = "blocking"
    wire: Wire = "float32"
    push_to: PushTo = "root"
    optimizer: OptimizerName = None

    def __post_init__(self) -> None:
        if not 1 <= self.servers <= MAX_SERVERS:
            raise ConfigError(f"{self.servers} servers cannot hold the parameters: use 1 to {MAX_SERVERS}")
        one_of("rate", self.rate, RATES)
        one_of("nonfinite", self.nonfinite, ("skip", "refuse"))
        one_of("exchange", self.exchange, ("blocking", "overlapped"))
        one_of("wire", self.wire, NARROWING)
        one_of("push_to", self.push_to, ("root", "group"))
        if self.optimizer is not None and not all(self.optimizer.partition(":")):
            raise ConfigError(f"the optimizer {shown(self.optimizer)} cannot be found: write my_module:MyClass")
        if self.clip is not None and not 0 < self.clip < float("inf"):
            raise ConfigError(f"a gradient's norm cannot be clipped to {self.clip}: use a positive number")

    @property
    def allowed(self) -> tuple[str, ...]:
        """The optimizers that servers may run besides those of `torch.optim`."""
        return () if self.optimizer is None else (self.optimizer,)


@final
@dataclass(frozen=True, slots=True)
class Outer:
    """The optimizer of a period: a step of SGD along the averaged difference of the models, instead of their average.

    Attributes:
        rate: Its learning rate, > 0; with 1 and no momentum the step leads to the average.
        momentum: From 0 to below 1.
        nesterov: Whether the step looks ahead by its momentum, as Nesterov's does.
        delayed: Whether servers apply the momentum once for each global batch of changes (Delayed Nesterov).
        wire: The format in which the differences travel.
        fragments: The number of parts of the model, each with periods and momentum of its own.
        alpha: The part of its own weights that a worker keeps of a fragment, from 0 to below 1; none where a period is
            cut short, so that all workers then have the same.
        delay: For so many iterations the workers compute on while differences travel; 0: they wait.

    Raises:
        ConfigError: A number is out of range, or no such format is known.
    """

    rate: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
    delayed: bool = False
    wire: Wire = "float32"
    fragments: int = 1
    alpha: float = 0.0
    delay: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.rate < float("inf"):
            raise ConfigError(f"an outer learning rate of {self.rate} is not possible: use a positive number")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"an outer momentum of {self.momentum} is not possible: use a number from 0 to below 1")
        one_of("wire", self.wire, NARROWING)
        if self.fragments < 1:
            raise ConfigError(f"a model cannot be cut into {self.fragments} fragments: use 1 or more")
        if not 0 <= self.alpha < 1:
            raise ConfigError(f"a worker cannot keep {self.alpha} of its own weights: use an alpha from 0 to below 1")
        if self.delay < 0:
            raise ConfigError(f"an exchange cannot take {self.delay} iterations: use a delay of 0 or more")
        if self.delay and self.wire != "float32":
            raise ConfigError("a narrow wire has two hops, which workers wait for: leave out delay, or wire")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """One answer to each question: *how much* (`load`) and *how far ahead* and *with whom* (`sync`).

    Attributes:
        name: The scheme string that makes the same scheme; recipes set it.
        load: How much each worker computes before the next synchronisation.
        sync: How far ahead a worker may run before it waits for the others.
        served: The options of the parameter servers; None if workers sum gradients among themselves, behind a barrier.
        period: None: gradients are summed in every iteration. A number: each worker trains alone for this many
            iterations, then the parameters are averaged, or servers step along its change.
        outer: The optimizer that steps along the averaged difference at the end of a period; each worker's own
            optimizer then keeps its state. None: the average replaces the models, and the states are averaged too.
        steps: With a period: `equal` steps of all workers, or, with `speed`, each worker takes as many steps on batches
            of its own size as its speed allows, `period` on average.
        weighting: `samples`: a worker counts by its samples, x_i / X, as in one process; `mean`: all workers count
            equally, whatever their sizes.
        exchange: When the workers exchange their speeds: `overlapped` with the communication of the gradients, or
            `blocking`, after it.
        micro_batch: The number of samples that a worker computes on at once; its size is a multiple of this. None: its
            whole batch at once.
        nonfinite: What to do with a worker whose part of a sum or an average is not finite, as in `lb_bsp`. Servers
            have a separate option.

    Raises:
        ConfigError: The parts do not go together.
    """

    name: str = "custom"
    load: Load
    sync: Sync = field(default_factory=Barrier)
    served: Served | None = None
    period: int | None = None
    outer: Outer | None = None
    steps: Literal["equal", "speed"] = "equal"
    weighting: Literal["samples", "mean"] = "samples"
    exchange: Literal["overlapped", "blocking"] = "overlapped"
    micro_batch: int | None = None
    nonfinite: NonfiniteSum = "spread"

    def __post_init__(self) -> None:
        if not isinstance(self.load, Load):
            raise ConfigError(
                f"the load of a scheme cannot be {shown(self.load)}: derive its class from evenstep.policies.Load"
            )
        if not callable(getattr(self.sync, "policy", None)):
            raise ConfigError(
                f"the sync of a scheme cannot be {shown(self.sync)}: give an object like evenstep.core.sync.Bounded()"
            )
        one_of("steps", self.steps, ("equal", "speed"))
        one_of("weighting", self.weighting, WEIGHTINGS)
        one_of("exchange", self.exchange, ("overlapped", "blocking"))
        one_of("nonfinite", self.nonfinite, ("skip", "refuse", "spread"))
        if self.period is not None:
            self._require_local()
        elif self.outer is not None or self.steps != "equal":
            raise ConfigError("outer and steps are about the steps of a period: give period too, or leave them out")
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
        if self.period is not None and self.period < 1:
            raise ConfigError(f"a period of {self.period} iterations is not possible: use 1 or more")
        if self.micro_batch is not None and not self.counts_periods:
            raise ConfigError(
                "local_sgd takes a step on every batch, so there is nothing to accumulate: leave out micro_batch, or"
                " use lb_bsp or dbs with it"
            )
        if (self.fragments > 1 or self.delay) and self.steps == "speed":
            raise ConfigError(
                "fragments meet, and differences arrive, between steps that all workers take, and steps=speed gives"
                " each its own number: leave out one of them, or use load=lb-bsp"
            )
        if self.period is not None and self.fragments > self.period:
            raise ConfigError(
                f"{self.fragments} fragments cannot meet at different iterations of a period of {self.period}: use"
                f" {self.period} or fewer"
            )
        if self.period is not None and self.delay >= self.period // self.fragments:
            raise ConfigError(
                f"a delay of {self.delay} lasts until the next exchange, which comes {self.period // self.fragments}"
                " iterations after the last: use a smaller delay or a longer period"
            )
        if self.exchange != "overlapped":
            raise ConfigError("local_sgd exchanges speeds with its averages: leave out exchange")

    def _require_servable(self, served: Served) -> None:
        if self.period is not None:
            self._require_local_servable(served, self.outer)
        elif self.micro_batch is not None or self.exchange != "overlapped":
            raise ConfigError(
                "parameter servers take a push from every batch and its speed with it: leave out micro_batch and the"
                " exchange of speeds"
            )
        if self.weighting != "samples":
            raise ConfigError("parameter servers weigh by samples: leave out weighting")
        if self.sync.in_step and served.exchange == "overlapped":
            raise ConfigError(
                "a barrier leaves nothing to compute on while it is waited for: leave out exchange=overlapped, or use"
                " ssp, dssp or asp"
            )
        if self.sync.in_step and served.wire != "float32":
            raise ConfigError(
                "workers that a barrier releases compute on the same weights, and a narrow wire rounds those of each"
                " differently: leave out wire, or use ssp, dssp or asp"
            )
        if self.sync.in_step and served.clip is not None and served.servers > 1:
            raise ConfigError(
                "no server sees the whole of a sum of several workers' gradients: clip with one server, or without a"
                " barrier"
            )

    def _require_local_servable(self, served: Served, outer: Outer | None) -> None:
        if outer is None or (outer.wire, outer.fragments, outer.alpha, outer.delay) != ("float32", 1, 0.0, 0):
            raise ConfigError(
                "servers step along whole changes of a period: give an Outer without fragments, alpha and delay, and"
                " Served the wire"
            )
        if self.load.follows_speed and self.steps == "equal":
            raise ConfigError(
                "sizes by speed give a worker more or fewer steps of a period on servers: give steps=speed too, or"
                " leave out load and inside"
            )
        if served.exchange == "overlapped":
            raise ConfigError(
                "a worker begins a period with the weights that answer its last push: leave out exchange=overlapped or"
                " period"
            )
        if served.optimizer is not None:
            raise ConfigError(
                "with a period the servers run the outer optimizer, and yours runs on the workers: leave out optimizer"
            )

    @property
    def counts_periods(self) -> bool:
        """True if all steps of a period are one iteration: each worker has its own number, or pushes when it likes."""
        return self.period is not None and (self.steps == "speed" or self.served is not None)

    @property
    def period_in_iterations(self) -> int:
        """Iterations between two averages."""
        return 1 if self.period is None or self.counts_periods else self.period

    @property
    def fragments(self) -> int:
        """The parts of the model that are averaged at different times."""
        return 1 if self.outer is None else self.outer.fragments

    @property
    def delay(self) -> int:
        """The iterations that workers compute on while an exchange of a period is under way."""
        return 0 if self.outer is None else self.outer.delay

    @property
    def batches_in_iteration(self) -> int:
        """The number of batches of its own size that a worker has in an iteration, on average."""
        return self.period if self.period is not None and self.counts_periods else 1

    @property
    def accumulates(self) -> bool:
        """True if an optimizer steps once for several micro-batches."""
        return self.micro_batch is not None and self.period is None

    @property
    def sums_every_gradient(self) -> bool:
        """True if all workers sum the gradients of each batch and step together, like DistributedDataParallel."""
        return (self.served, self.period, self.micro_batch) == (None, None, None)

    def require_elastic(self) -> None:
        """Check that it can run while workers come and go.

        Raises:
            ConfigError: It cannot.
        """
        summing = self.served is None and not self.accumulates
        if not summing or self.load.uses_forecasts or self.nonfinite == "refuse":
            raise ConfigError(
                f"the scheme {self.name!r} cannot run while members come and go: use lb-bsp, dbs, bsp, batch_sizes,"
                " local-sgd or diloco, without predictor=narx and nonfinite=refuse"
            )
        outer = self.outer or Outer()
        if (outer.fragments, outer.alpha, outer.delay, outer.wire) != (1, 0, 0, "float32"):
            raise ConfigError(
                "while members come and go each period counts as a whole, and a replica that joins has the weights of"
                " the others: leave out fragments, alpha, delay and wire"
            )

    def policy(self, workers: int) -> LoadPolicy:
        """Make a new policy that decides the sizes of this many workers without servers."""
        return load_policy(self.load, workers)

    def __str__(self) -> str:
        return self.name


def placed(scheme: Scheme, hosts: Sequence[str], gpus: Sequence[str] | None = None) -> Scheme:
    """The scheme for workers on these hosts, by rank: if it asks for groups by host, with those groups.

    With `gpus` (names or "", by rank), sizes by rank, host or GPU also become sizes by rank.

    Raises:
        ConfigError: The scheme asks for more groups than there are workers, or its sizes do not match these workers.

    >>> from evenstep.schemes import grouped, static
    >>> placed(grouped(groups="hosts"), ["a", "b", "a"]).name
    'grouped:groups=0+2/1'
    >>> placed(static({"rank:0": 4, "host:a": 8, "gpu:X": 2}), ["a", "b", "a"], ["", "X", "X"]).name
    'static:4/2/8'
    """
    if isinstance(scheme.load, ByKey) and gpus is not None:
        described = [{"rank": str(rank), "host": host, "gpu": gpus[rank]} for rank, host in enumerate(hosts)]
        load = scheme.load.of(described)
        name = scheme.name.replace(text_of(dict(scheme.load.sizes)), text_of(load.sizes))
        scheme = replace(scheme, name=name, load=load)
    if not isinstance(sync := scheme.sync, Grouped):
        return scheme
    if isinstance(sync.grouping, ByRank | BySpeed) and (count := sync.grouping.count) > len(hosts):
        raise ConfigError(f"{len(hosts)} workers cannot be in {count} groups: use {len(hosts)} or fewer")
    if not isinstance(sync.grouping, ByHost):
        return scheme
    groups = by_host(hosts)
    text = "/".join("+".join(map(str, group)) for group in groups) if len(groups) > 1 else "1"
    # The one parameter whose value is `hosts`.
    name = scheme.name.replace("groups=hosts", f"groups={text}")
    return replace(
        scheme, name=name, sync=replace(sync, grouping=GivenGroups(groups) if len(groups) > 1 else ByRank(1))
    )


def one_of(parameter: str, value: str, known: Collection[str]) -> None:
    """Raise ConfigError unless the value of the parameter is one of these words."""
    if value not in known:
        *others, last = known
        raise ConfigError(f"{parameter} cannot be {value!r}: use {', '.join(others)} or {last}")
