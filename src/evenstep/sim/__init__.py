"""The second shell around the core: replays its decisions in virtual time, on clusters that one need not have."""

from evenstep.sim.log import Log
from evenstep.sim.result import SimulatedRun, SimulatedWorker
from evenstep.sim.scenario import Scenario
from evenstep.sim.simulate import simulate

__all__ = ["Log", "Scenario", "SimulatedRun", "SimulatedWorker", "simulate"]
