"""The results of a simulation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final


@final
@dataclass(slots=True)
class SimulatedWorker:
    """One worker over the whole run; seconds are sums.

    `wait_seconds` is the waiting for other workers, behind a barrier or held by a bound; `idle_seconds` the waiting for
    samples or for the beginning of an epoch; `present_seconds` all the time that the worker was present. Compute and
    communication cut off by a leave or the end of the run are only in `present_seconds`. `staleness` counts versions
    and `lead` iterations; both are 0 without servers.
    """

    worker: int
    samples: int = 0
    iterations: int = 0
    last_batch_size: int = 0
    compute_seconds: float = 0.0
    wait_seconds: float = 0.0
    comm_seconds: float = 0.0
    idle_seconds: float = 0.0
    present_seconds: float = 0.0
    mean_staleness: float = 0.0
    largest_staleness: int = 0
    largest_lead: int = 0

    @property
    def speed(self) -> float:
        """Samples per second of pure compute; 0 if the worker has computed nothing."""
        return self.samples / self.compute_seconds if self.compute_seconds else 0.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """A simulated run: `samples` were committed in `seconds` of virtual time, with `commits` updates of the parameters.

    `complete`: these are all samples of the run; otherwise all workers left earlier.
    """

    scheme: str
    global_batch_size: int
    seconds: float
    samples: int
    commits: int
    complete: bool
    workers: tuple[SimulatedWorker, ...]

    @property
    def samples_per_second(self) -> float:
        """Throughput, including waiting and communication."""
        return self.samples / self.seconds

    @property
    def ideal_samples_per_second(self) -> float:
        """The sum of the workers' speeds at the sizes that they had, each weighted by the time that it was present."""
        return sum(each.speed * each.present_seconds for each in self.workers) / self.seconds

    @property
    def over_ideal(self) -> float:
        """Throughput over that ideal; at most 1, except for work under way at the end of the run."""
        return self.samples_per_second / self.ideal_samples_per_second

    @property
    def waiting_share(self) -> float:
        """The fraction of the workers' time in which they waited for each other or for samples, 0 to 1."""
        waited = sum(each.wait_seconds + each.idle_seconds for each in self.workers)
        return waited / self._present_seconds

    @property
    def communication_share(self) -> float:
        """The fraction of the workers' time in which they communicated, 0 to 1."""
        return sum(each.comm_seconds for each in self.workers) / self._present_seconds

    @property
    def mean_staleness(self) -> float:
        """The mean staleness of all pushes."""
        pushes = sum(each.iterations for each in self.workers)
        return sum(each.mean_staleness * each.iterations for each in self.workers) / pushes

    @property
    def largest_staleness(self) -> int:
        """The largest staleness of any push."""
        return max(each.largest_staleness for each in self.workers)

    @property
    def largest_lead(self) -> int:
        """The largest lead of any worker at any release."""
        return max(each.largest_lead for each in self.workers)

    @property
    def commits_per_second(self) -> float:
        """Updates of the parameters per second."""
        return self.commits / self.seconds

    @property
    def _present_seconds(self) -> float:
        return sum(each.present_seconds for each in self.workers)

    def summary(self) -> dict[str, object]:
        """All figures except those of single workers, for JSON."""
        return {
            "scheme": self.scheme,
            "workers": len(self.workers),
            "global_batch_size": self.global_batch_size,
            "complete": self.complete,
            **{name: getattr(self, name) for name in _FIGURES},
        }


_FIGURES: Sequence[str] = (
    "seconds",
    "samples",
    "samples_per_second",
    "ideal_samples_per_second",
    "over_ideal",
    "waiting_share",
    "communication_share",
    "mean_staleness",
    "largest_staleness",
    "largest_lead",
    "commits",
    "commits_per_second",
)
