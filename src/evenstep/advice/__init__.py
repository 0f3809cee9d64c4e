"""Advice: the best scheme on given machines, and its gain over plain synchronous training."""

from evenstep.advice.advise import Advice, advise, balancing
from evenstep.advice.machines import Machines, accounted_machines, described_machines, measured_machines

__all__ = ["Advice", "Machines", "accounted_machines", "advise", "balancing", "described_machines", "measured_machines"]
