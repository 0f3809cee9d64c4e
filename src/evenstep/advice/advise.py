"""Finds the scheme to use on given machines by simulating schemes on their measurements."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, final

from evenstep.advice.machines import Machines, longest
from evenstep.advice.reasons import reasons
from evenstep.core.errors import ConfigError
from evenstep.core.sync.barrier import Barrier
from evenstep.report.account.verdict import PLAIN, Verdict
from evenstep.schemes import parse_scheme
from evenstep.sim import Scenario, SimulatedRun, simulate

EXACT: Final = (PLAIN, "lb-bsp", "dbs")
"""The compared schemes whose gradients are never stale."""
STALE: Final = ("ssp", "dssp", "asp", "ssp:load=lb-bsp", "dssp:load=lb-bsp", "asp:load=lb-bsp")
BALANCED: Final = "lb-bsp"
"""The scheme that a run with equal sizes is compared with."""
WORTH: Final = 0.02
"""A gain below this does not justify another scheme."""
STALE_WORTH: Final = 0.1
"""A gain over the best exact scheme below this does not justify stale gradients."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The recommended scheme and the reasons; runs are simulated, and have the schemes as they were requested.

    Attributes:
        pick: The run under the scheme to use.
        stale: One with stale gradients and clearly more samples per second; None if there is none.
        runs: All runs, under exact schemes first.
        why: Sentences about what slows these machines.
        simulated: For a run, the simulated samples/s of its own scheme, to compare with `measured`.
        measured: The samples/s of the run; None for a cluster file.
        most: Whether gains are the largest possible, because times were assumed to be in proportion to sizes.
    """

    pick: SimulatedRun
    stale: SimulatedRun | None
    runs: tuple[SimulatedRun, ...]
    why: tuple[str, ...]
    simulated: float | None
    measured: float | None
    most: bool = False

    def speed_up(self, run: SimulatedRun) -> float:
        """The speed of a run relative to plain training."""
        return run.samples_per_second / _plain(self.runs).samples_per_second

    @property
    def text(self) -> str:
        """The advice in one or two sentences."""
        if self.pick.scheme == PLAIN:
            compared = any(is_exact(each.scheme) for each in self.runs if each is not self.pick)
            head = "Nothing is to be gained over plain DDP" + (" without stale gradients" if self.stale else "")
            head = head if compared else "No other exact scheme was compared with plain DDP"
        else:
            most = "up to " if self.most else ""
            head = f"Use {self.pick.scheme}: {most}{_percent(self.speed_up(self.pick))} over plain DDP"
        if self.stale is None:
            return f"{head}."
        inexact = f"gradients that are {self.stale.mean_staleness:.1f} versions old on average"
        if not self.stale.mean_staleness:
            inexact = "models that differ between workers until they are averaged"
        return (
            f"{head}. {self.stale.scheme} would process {_percent(self.speed_up(self.stale))}, with {inexact}: compare"
            " the accuracy before you rely on it."
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
                    "speed_up": self.speed_up(each),
                    "staleness": each.mean_staleness,
                }
                for each in self.runs
            ],
        }


def advise(
    machines: Machines,
    *,
    schemes: Sequence[str] = (*EXACT, *STALE),
    message_bytes: int | None = None,
) -> Advice:
    """Simulate the schemes on these machines and choose one.

    The gain of a scheme is its samples/s divided by plain training's, both simulated on the same iterations. The pick
    is the exact scheme with the largest gain, if that is 2 % or more. A stale scheme is also named if it processes 10 %
    more than the pick: of those within 3 % of the fastest, the one with the least staleness.

    Args:
        machines: The machines, measured or described.
        schemes: The schemes to compare with `bsp`, which is always simulated.
        message_bytes: The size of a worker's gradients on the cluster's links.

    Raises:
        ConfigError: The cluster has links but the size of the gradients is not given, or it has spot workers, with
            which plain training would end.
    """
    if any(each.spot is not None for each in machines.cluster.workers):
        raise ConfigError(
            "plain DDP, with which advice compares, ends with the first spot worker that leaves: compare schemes on"
            " servers by evenstep simulate instead"
        )
    names = sorted(dict.fromkeys((PLAIN, *schemes)), key=lambda name: not is_exact(name))
    runs = [_simulated(machines, name, message_bytes) for name in names]
    plain, exact = _plain(runs), [each for each in runs if is_exact(each.scheme)]
    pick = max(exact, key=lambda each: each.samples_per_second)
    if pick.samples_per_second < (1 + WORTH) * plain.samples_per_second:
        pick = plain
    stale = [each for each in runs if not is_exact(each.scheme)]
    best = max((each.samples_per_second for each in stale), default=0.0)
    close = [each for each in stale if each.samples_per_second >= 0.97 * best]
    least = min(close, key=lambda each: each.mean_staleness, default=pick)
    (scheme, measured), simulated = machines.measured or (None, None), None
    if scheme is not None:
        with suppress(ConfigError):  # It cannot be simulated.
            parse_scheme(scheme, imports=False)  # A name from a log must not choose a module to import.
            simulated = _simulated(machines, scheme, message_bytes).samples_per_second
    return Advice(
        pick=pick,
        stale=least if least.samples_per_second >= (1 + STALE_WORTH) * pick.samples_per_second else None,
        runs=tuple(runs),
        why=tuple(reasons(machines)),
        simulated=simulated,
        measured=measured,
        most=machines.proportional,
    )


def balancing(verdict: Verdict, machines: Callable[[], Machines], then: str) -> str:
    """Return the gain of `lb-bsp` over a run under `bsp`, as `evenstep plan` predicts it, and `then` if it gains.

    Empty where the verdict says that sizes cannot help.
    """
    if not verdict.sizes_may_help:
        return ""
    try:
        advice = advise(machines(), schemes=(BALANCED,))
    except ConfigError:  # One worker, or too few iterations.
        return ""
    if advice.pick.scheme == PLAIN:
        return f"{BALANCED} would gain less than {WORTH:.0%}."
    return f"{advice.text} Next: {then}."


def is_exact(name: str) -> bool:
    """True if a scheme trains like one process with the global batch."""
    scheme = parse_scheme(name)
    return isinstance(scheme.sync, Barrier) and scheme.period is None


def _plain(runs: Sequence[SimulatedRun]) -> SimulatedRun:
    return next(each for each in runs if each.scheme == PLAIN)


def _simulated(machines: Machines, name: str, message_bytes: int | None) -> SimulatedRun:
    iterations = max(min(400, longest(len(machines.cluster))), machines.seconds.shape[1])
    scenario = Scenario(
        cluster=machines.cluster,
        scheme=parse_scheme(name),
        global_batch_size=machines.global_batch_size,
        iterations=iterations,
        # Schemes that decide once an epoch do so several times.
        epoch_samples=min(100, iterations // 4) * machines.global_batch_size,
        message_bytes=message_bytes,
        exchange_seconds=machines.exchange_seconds,
    )
    return replace(simulate(scenario), scheme=name)


def _percent(speed_up: float) -> str:
    """Format a gain: `+38 %`."""
    return f"{100 * (speed_up - 1):+.0f} %"
