"""Time as a function of batch size, for all workers at once."""

from evenstep.core.load.times.affine import Affine
from evenstep.core.load.times.proportional import ThroughOrigin

__all__ = ["Affine", "ThroughOrigin"]
