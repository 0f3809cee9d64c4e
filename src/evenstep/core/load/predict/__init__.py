"""Predictors of one worker's seconds per sample, by the names that schemes use."""

from collections.abc import Callable
from types import MappingProxyType
from typing import Final

from evenstep.core.load.predict.averages import Ema, Mean
from evenstep.core.load.predict.base import Predictor
from evenstep.core.load.predict.change import Change
from evenstep.core.load.predict.narx import Narx

__all__ = ["PREDICTORS", "Change", "Ema", "Mean", "Narx"]

PREDICTORS: Final[MappingProxyType[str, Callable[[], Predictor]]] = MappingProxyType(
    {
        # An average over about the last 40 iterations.
        "change": lambda: Change(Ema(alpha=0.05)),
        "ema": Ema,
        "last": lambda: Ema(alpha=1.0),
        "mean": Mean,
        "narx": Narx,
    }
)
