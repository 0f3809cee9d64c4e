"""Predictors of one worker's seconds per sample, by the names that schemes use."""

from collections.abc import Callable
from types import MappingProxyType
from typing import Final

from evenstep.core.load.predict.base import Predictor
from evenstep.core.load.predict.change import Change
from evenstep.core.load.predict.ema import Ema
from evenstep.core.load.predict.last import Last
from evenstep.core.load.predict.mean import Mean
from evenstep.core.load.predict.narx import Narx

__all__ = [
    "PREDICTORS",
    "Change",
    "Ema",
    "Last",
    "Mean",
    "Narx",
    "steady_unless_changed",
]


def steady_unless_changed() -> Change:
    """An average over about the last 40 iterations that follows a change of speed at once."""
    return Change(Ema(alpha=0.05))


PREDICTORS: Final[MappingProxyType[str, Callable[[], Predictor]]] = MappingProxyType(
    {
        "change": steady_unless_changed,
        "ema": Ema,
        "last": Last,
        "mean": Mean,
        "narx": Narx,
    }
)
