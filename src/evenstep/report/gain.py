"""How fast a run was, beside the same run with equal sizes, and beside workers that never wait."""

from dataclasses import dataclass
from typing import final

from evenstep.core.account import Interval
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


def gain_of(summary: RunSummary, speed_up: Interval | None) -> Gain:
    """The gain of a run, where its account tells that speed-up."""
    computing = [each for each in summary.workers if each.compute_seconds]
    ideal = sum(each.samples / (each.compute_seconds * each.iterations) for each in computing)
    return Gain(measured=summary.samples_per_second, speed_up=speed_up, ideal=ideal)
