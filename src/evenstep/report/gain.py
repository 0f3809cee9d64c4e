"""How fast a run was, beside the same run with equal sizes, and beside workers that never wait."""

from dataclasses import dataclass
from typing import final

from evenstep.core.account import Account, Interval, ServedWorker
from evenstep.report.summary import RunSummary


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Throughputs in samples per second.

    `measured` is the run's own. `speed_up` is how many times as fast it was as with equal sizes, measured on its own
    iterations with equal sizes; None where too few tell, and on servers. `ideal` is the sum of the workers' speeds on
    the sizes that they had: no worker waits, and nothing takes time but computing.
    """

    measured: float
    speed_up: Interval | None
    ideal: float

    @property
    def equal(self) -> float | None:
        """What equal sizes would have reached; None where that is not known."""
        return None if self.speed_up is None else self.measured / self.speed_up.estimate

    @property
    def of_ideal(self) -> float:
        """The part of the ideal that was reached, 0 to 1."""
        return self.measured / self.ideal


def gain_of(summary: RunSummary, account: Account) -> Gain:
    """The gain of a run behind a barrier."""
    return Gain(measured=summary.samples_per_second, speed_up=account.speed_up, ideal=account.ideal)


def served_gain(summary: RunSummary, workers: list[ServedWorker]) -> Gain:
    """The throughput of a run on servers; there is nothing to compare its sizes with."""
    samples = {each.worker: each.samples for each in summary.workers}
    ideal = sum(samples[each.worker] / each.compute for each in workers if each.compute)
    return Gain(measured=summary.samples_per_second, speed_up=None, ideal=ideal)
