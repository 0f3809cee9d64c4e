"""The event log of a simulated run: the same events that the workers and servers of a real run write."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from evenstep.core.values import Basis
from evenstep.sim.scenario import Scenario
from evenstep.sim.worker import VirtualWorker
from evenstep.telemetry import SCHEMA, Recorder
from evenstep.telemetry.events import Disturbed, Ended, Planned, Run


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """The recorders of all workers and of the first server; the latter is silent if the scheme has no servers."""

    workers: Sequence[Recorder]
    server: Recorder

    def run(self, worker: int, scenario: Scenario) -> None:
        """Record that a worker begins; `simulated` distinguishes this from a real run."""
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
        """Record that a worker learns new sizes."""
        self.workers[worker].record(
            Planned(worker=worker, iteration=iteration, batch_sizes=list(batch_sizes), basis=basis)
        )

    def started(self, worker: VirtualWorker, iteration: int, at: float) -> None:
        """A worker begins an iteration: record if it is slower or faster from now on."""
        slowness = worker.news.of(iteration)
        if slowness is not None:
            factor, extra = slowness.factor, slowness.extra_seconds
            self.workers[worker.number].record(
                Disturbed(worker=worker.number, iteration=iteration, at=at, factor=factor, extra_seconds=extra)
            )

    def end(self, worker: int, at: float) -> None:
        """Record that a worker has finished."""
        self.workers[worker].record(Ended(worker=worker, at=at))

    def close(self) -> None:
        """Close all recorders."""
        for recorder in (*self.workers, self.server):
            recorder.close()
