"""Which scheme to use on these machines, by simulating the schemes on what was measured of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from evenstep.advice.machines import Machines, longest
from evenstep.advice.reasons import reasons
from evenstep.core.errors import ConfigError
from evenstep.core.sync.barrier import Barrier
from evenstep.schemes import parse_scheme
from evenstep.sim import Scenario, SimulatedRun, simulate

PLAIN: Final = "bsp"
"""Equal sizes behind a barrier, which is what plain DistributedDataParallel does."""
EXACT: Final = (PLAIN, "lb-bsp", "dbs")
"""What is compared of the schemes whose gradients are never stale."""
STALE: Final = ("ssp", "dssp", "asp", "ssp:load=lb-bsp", "dssp:load=lb-bsp", "asp:load=lb-bsp")
WORTH: Final = 0.02
"""A smaller gain is not worth another scheme."""
STALE_WORTH: Final = 0.1
"""Nor is a smaller gain over the best exact scheme worth stale gradients."""

_ITERATIONS: Final = 400
_EPOCH: Final = 100
_CLOSE: Final = 0.03


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """What one scheme would do: samples/s, and how many times as fast as plain training that is.

    `staleness` is the mean number of versions that a gradient is behind; 0 for exact schemes.
    """

    scheme: str
    samples_per_second: float
    speed_up: float
    staleness: float

    @property
    def exact(self) -> bool:
        """Whether it trains as one process with the global batch would."""
        return _exact(self.scheme)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What to use, and why.

    Attributes:
        pick: The scheme to use.
        stale: A scheme with stale gradients that processes clearly more samples per second; None if there is none.
        figures: Every scheme that was simulated, exact ones first.
        why: What slows these machines, a sentence each.
        simulated: For a run, the samples/s that its own scheme has in the simulation, to be compared with the measured.
        measured: The samples/s of the run; None for a cluster file.
    """

    pick: Figure
    stale: Figure | None
    figures: tuple[Figure, ...]
    why: tuple[str, ...]
    simulated: float | None
    measured: float | None

    @property
    def text(self) -> str:
        """The advice in a sentence or two."""
        if self.pick.scheme == PLAIN:
            compared = any(each.exact for each in self.figures if each is not self.pick)
            head = "Nothing is to be gained over plain DDP" + (" without stale gradients" if self.stale else "")
            head = head if compared else "No other exact scheme was compared with plain DDP"
        else:
            head = f"Use {self.pick.scheme}: {_percent(self.pick.speed_up)} over plain DDP"
        if self.stale is None:
            return f"{head}."
        inexact = f"gradients that are {self.stale.staleness:.1f} versions old on average"
        if not self.stale.staleness:
            inexact = "models that differ between workers until they are averaged"
        return (
            f"{head}. {self.stale.scheme} would process {_percent(self.stale.speed_up)}, with {inexact}: compare the"
            " accuracy before you rely on it."
        )

    @property
    def values(self) -> dict[str, Any]:
        """The advice as plain values that JSON can hold."""
        return {
            "pick": self.pick.scheme,
            "stale": None if self.stale is None else self.stale.scheme,
            "text": self.text,
            "why": list(self.why),
            "measured_samples_per_second": self.measured,
            "simulated_samples_per_second": self.simulated,
            "schemes": [
                {
                    "scheme": each.scheme,
                    "samples_per_second": each.samples_per_second,
                    "speed_up": each.speed_up,
                    "staleness": each.staleness,
                }
                for each in self.figures
            ],
        }


def advise(
    machines: Machines,
    *,
    schemes: Sequence[str] = (*EXACT, *STALE),
    message_bytes: int | None = None,
    progress: Callable[[float], None] = lambda _: None,
) -> Advice:
    """Simulate the schemes on these machines and choose one.

    The gain of a scheme is its samples/s over those of plain training, both simulated on the same iterations. The pick
    is the exact scheme that gains most, if that is 2 % or more. A stale scheme is named beside it if it processes 10 %
    more than the pick: of those within 3 % of the fastest, the one with the least staleness.

    Args:
        machines: Measured or described.
        schemes: What to compare with `bsp`, which is always simulated.
        message_bytes: The size of a worker's gradients on the cluster's links.
        progress: Called with the part that is done, 0 to 1.

    Raises:
        ConfigError: The cluster has links, and the size of the gradients is not given; or it has spot workers, with
            which plain training would end.
    """
    if any(each.spot is not None for each in machines.cluster.workers):
        raise ConfigError(
            "plain DDP, with which advice compares, ends with the first spot worker that leaves: compare schemes on"
            " servers by evenstep simulate instead"
        )
    names = sorted(dict.fromkeys((PLAIN, *schemes)), key=lambda name: not _exact(name))
    runs = {}
    for done, name in enumerate(names, start=1):
        runs[name] = _simulated(machines, name, message_bytes)
        progress(done / len(names))
    plain = runs[PLAIN].samples_per_second
    figures = tuple(
        Figure(
            scheme=name,
            samples_per_second=run.samples_per_second,
            speed_up=run.samples_per_second / plain,
            staleness=run.mean_staleness,
        )
        for name, run in runs.items()
    )
    pick, worth = _chosen(figures)
    measured = machines.measured
    own = None if measured is None else _own(machines, measured[0], message_bytes)
    return Advice(
        pick=pick,
        stale=worth,
        figures=figures,
        why=tuple(reasons(machines)),
        simulated=own,
        measured=None if measured is None else measured[1],
    )


def _exact(name: str) -> bool:
    """Whether a scheme trains as one process with the global batch would."""
    scheme = parse_scheme(name)
    return isinstance(scheme.sync, Barrier) and scheme.period is None


def _chosen(figures: Sequence[Figure]) -> tuple[Figure, Figure | None]:
    """The exact scheme to use, and the stale one that is worth a thought."""
    plain = next(each for each in figures if each.scheme == PLAIN)
    exact = [each for each in figures if each.exact and each.speed_up >= 1 + WORTH]
    pick = max(exact, key=lambda each: each.speed_up, default=plain)
    stale = _least_stale(figures)
    if stale is None or stale.samples_per_second < (1 + STALE_WORTH) * pick.samples_per_second:
        return pick, None
    return pick, stale


def _least_stale(figures: Sequence[Figure]) -> Figure | None:
    """Of the stale schemes about as fast as the fastest, the one with the least staleness; None without any."""
    stale = [each for each in figures if not each.exact]
    best = max((each.samples_per_second for each in stale), default=0.0)
    close = [each for each in stale if each.samples_per_second >= (1 - _CLOSE) * best]
    return min(close, key=lambda each: each.staleness, default=None)


def _simulated(machines: Machines, name: str, message_bytes: int | None) -> SimulatedRun:
    iterations = max(min(_ITERATIONS, longest(len(machines.cluster))), machines.factors.shape[1])
    scenario = Scenario(
        cluster=machines.disturbed(),
        scheme=parse_scheme(name),
        global_batch_size=machines.global_batch_size,
        iterations=iterations,
        epoch_samples=min(_EPOCH, iterations // 4) * machines.global_batch_size,
        message_bytes=message_bytes,
        exchange_seconds=machines.exchange_seconds,
    )
    return simulate(scenario)


def _own(machines: Machines, scheme: str, message_bytes: int | None) -> float | None:
    """The samples/s of the run's own scheme; None if that cannot be simulated."""
    try:
        parse_scheme(scheme, imports=False)  # The name comes from a log, which must not choose a module to import.
        return _simulated(machines, scheme, message_bytes).samples_per_second
    except ConfigError:
        return None


def _percent(speed_up: float) -> str:
    """A gain: `+38 %`."""
    return f"{100 * (speed_up - 1):+.0f} %"
