"""How much does each worker compute before the next synchronisation? Decides batch sizes from measured times."""

from evenstep.core.load.base import Load, LoadPolicy
from evenstep.core.load.chosen import Chosen
from evenstep.core.load.equal import Equal
from evenstep.core.load.estimate import Estimator
from evenstep.core.load.pairwise import Pairwise
from evenstep.core.load.per_epoch import PerEpoch
from evenstep.core.load.predict import PREDICTORS
from evenstep.core.load.predict.base import Predictor
from evenstep.core.load.predicted import Predicted
from evenstep.core.load.solver import TimeModels
from evenstep.core.load.static import Static

__all__ = [
    "PREDICTORS",
    "Chosen",
    "Equal",
    "Estimator",
    "Load",
    "LoadPolicy",
    "Pairwise",
    "PerEpoch",
    "Predicted",
    "Predictor",
    "Static",
    "TimeModels",
]
