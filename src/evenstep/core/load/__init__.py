"""How much does each worker compute before the next synchronisation? Decides batch sizes from measured times."""

from evenstep.core.load.base import Load, LoadOf, LoadPolicy
from evenstep.core.load.equal import Equal
from evenstep.core.load.expert import Averages, Even, Expert
from evenstep.core.load.experts import PREDICTORS, Experts
from evenstep.core.load.per_epoch import PerEpoch
from evenstep.core.load.static import Static

__all__ = [
    "PREDICTORS",
    "Averages",
    "Equal",
    "Even",
    "Expert",
    "Experts",
    "Load",
    "LoadOf",
    "LoadPolicy",
    "PerEpoch",
    "Static",
]
