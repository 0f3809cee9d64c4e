"""Time as a function of batch size, for all workers at once."""

from evenstep.core.load.times.affine import Affine
from evenstep.core.load.times.flat_start import FlatStart
from evenstep.core.load.times.in_multiples import InMultiples
from evenstep.core.load.times.proportional import ThroughOrigin

__all__ = ["Affine", "FlatStart", "InMultiples", "ThroughOrigin"]
