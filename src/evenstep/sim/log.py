"""The event log of a simulated run: the same events that the workers and servers of a real run write."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from evenstep.cluster.slowness import Slowness
from evenstep.core.values import Basis
from evenstep.sim.scenario import Scenario
from evenstep.telemetry import SCHEMA, Recorder
from evenstep.telemetry.events import Disturbed, Ended, Planned, Run


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """The recorder of each worker and of the first server, which is silent if the scheme has no servers."""

    workers: Sequence[Recorder]
    server: Recorder

    def run(self, worker: int, scenario: Scenario) -> None:
        """A worker begins; `simulated` tells this from a real run."""
        problem = scenario.problem
        self.workers[worker].record(
            Run(
                worker=worker,
                schema=SCHEMA,
                workers=len(scenario.cluster),
                scheme=scenario.scheme.name,
                engine="collective" if scenario.scheme.served is None else "server",
                global_batch_size=scenario.global_batch_size,
                iterations_per_epoch=scenario.ledger().iterations,
                minimum=problem.minimum.tolist(),
                maximum=problem.maximum.tolist(),
                multiple=problem.multiple,
                seed=scenario.cluster.seed,
                simulated=True,
            )
        )

    def plan(self, worker: int, iteration: int, batch_sizes: Sequence[int], basis: Basis = "speed") -> None:
        """A worker learns of other sizes."""
        self.workers[worker].record(
            Planned(worker=worker, iteration=iteration, batch_sizes=list(batch_sizes), basis=basis)
        )

    def disturbance(self, worker: int, iteration: int, at: float, slowness: Slowness) -> None:
        """A worker is slower or faster from this iteration on, which begins at `at`."""
        factor, extra = slowness.factor, slowness.extra_seconds
        self.workers[worker].record(
            Disturbed(worker=worker, iteration=iteration, at=at, factor=factor, extra_seconds=extra)
        )

    def end(self, worker: int, at: float) -> None:
        """A worker is done."""
        self.workers[worker].record(Ended(worker=worker, at=at))

    def close(self) -> None:
        """Close all recorders."""
        for recorder in (*self.workers, self.server):
            recorder.close()
