"""The event log of a simulated run: the very events that the workers and servers of a real run write down."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Final, final

from evenstep.cluster.slowness import Slowness
from evenstep.core.values import Basis, Factors
from evenstep.sim.scenario import Scenario
from evenstep.telemetry import SCHEMA, Recorder

TALLY_SECONDS: Final = 1.0
"""How often a server writes down what it has done, in virtual seconds."""

_FACTORS: Final = list(astuple(Factors()))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """Where each worker's events go, and the first server's, which is silent where there is none."""

    workers: Sequence[Recorder]
    server: Recorder

    def run(self, worker: int, scenario: Scenario) -> None:
        """A worker begins; `simulated` tells this from a real run."""
        problem = scenario.problem
        self.workers[worker].record(
            {
                "event": "run",
                "schema": SCHEMA,
                "workers": len(scenario.cluster),
                "scheme": scenario.scheme.name,
                "engine": "collective" if scenario.scheme.served is None else "server",
                "global_batch_size": scenario.global_batch_size,
                "iterations_per_epoch": scenario.ledger().iterations,
                "minimum": problem.minimum.tolist(),
                "maximum": problem.maximum.tolist(),
                "multiple": problem.multiple,
                "seed": scenario.cluster.seed,
                "simulated": True,
            }
        )

    def plan(self, worker: int, iteration: int, batch_sizes: Sequence[int], basis: Basis = "speed") -> None:
        """A worker has heard of other sizes."""
        self.workers[worker].record(
            {"event": "plan", "iteration": iteration, "batch_sizes": list(batch_sizes), "basis": basis}
        )

    def disturbance(self, worker: int, iteration: int, at: float, slowness: Slowness) -> None:
        """A worker is made slower or faster from this iteration on, which begins now."""
        about = {"factor": slowness.factor, "extra_seconds": slowness.extra_seconds}
        self.workers[worker].record({"event": "disturbance", "iteration": iteration, "at": at, **about})

    def end(self, worker: int, at: float) -> None:
        """A worker is done."""
        self.workers[worker].record({"event": "end", "at": at})

    def iteration(self, worker: int, parts: Mapping[str, object], more: Mapping[str, object]) -> None:
        """A worker's iteration is over; `more` is what servers told of its push."""
        self.workers[worker].record({"event": "iteration", **parts, **more, "factors": _FACTORS})

    def served(self, event: str, at: float, version: int, **more: object) -> None:
        """Something happened on the first server."""
        self.server.record({"event": event, "at": at, "version": version, **more})

    def close(self) -> None:
        """Nothing more will come."""
        for recorder in (*self.workers, self.server):
            recorder.close()
