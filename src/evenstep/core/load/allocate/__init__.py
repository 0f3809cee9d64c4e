"""From weights or time models to whole batch sizes; knows nothing of where those come from."""

from evenstep.core.load.allocate.bounds import Bounds
from evenstep.core.load.allocate.shares import share_out, shares
from evenstep.core.load.allocate.solver import reachable, solve

__all__ = ["Bounds", "reachable", "share_out", "shares", "solve"]
