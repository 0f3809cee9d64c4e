"""The second shell around the core: replays its decisions in virtual time, on clusters that need not exist."""

from evenstep.sim.costs import CostsOfSamples
from evenstep.sim.log import Log
from evenstep.sim.result import SimulatedRun, SimulatedWorker
from evenstep.sim.rounds import Client, FederatedRun, FederatedScenario, Learner, simulate_rounds
from evenstep.sim.scenario import Scenario
from evenstep.sim.simulate import simulate

__all__ = [
    "Client",
    "CostsOfSamples",
    "FederatedRun",
    "FederatedScenario",
    "Learner",
    "Log",
    "Scenario",
    "SimulatedRun",
    "SimulatedWorker",
    "simulate",
    "simulate_rounds",
]
