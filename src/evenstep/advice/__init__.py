"""Advice: the best scheme on given machines, and its gain over plain synchronous training."""

from evenstep.advice.advise import Advice, advise
from evenstep.advice.machines import Machines, described_machines, measured_machines

__all__ = ["Advice", "Machines", "advise", "described_machines", "measured_machines"]
