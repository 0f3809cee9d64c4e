"""From weights or time models to whole batch sizes; knows nothing of where those come from."""

from evenstep.core.load.allocate.shares import shares
from evenstep.core.load.allocate.solver import reachable, solve

__all__ = ["reachable", "shares", "solve"]
