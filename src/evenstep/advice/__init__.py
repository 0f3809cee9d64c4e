"""Advice: which scheme is best on these machines, and what it gains over plain synchronous training."""

from evenstep.advice.advise import Advice, Figure, advise
from evenstep.advice.machines import Machines, described_machines, measured_machines

__all__ = ["Advice", "Figure", "Machines", "advise", "described_machines", "measured_machines"]
