"""Competing ways to predict each worker's speed in the next iteration."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import ClassVar, Self, final

import numpy as np

from evenstep.core.errors import ConfigError
from evenstep.core.shown import shown
from evenstep.core.state import Stateful
from evenstep.core.values import BoolArray, FloatArray, IntArray, Reports


class Expert(Stateful, ABC):
    """Predicts the speeds of all workers, in proportion to which it proposes sizes.

    Every worker runs its own copy on the same reports, and all copies must predict alike: no clock, random numbers, or
    functions that processors round differently (exp, log, powers, sums of floats in an unstated order). An expert with
    memory is a dataclass whose fields with `init=False` are its checkpoint (see `Stateful`).

    Attributes:
        uses_forecasts: Whether it needs `Reports.forecast`, for which each worker measures the factors that drive it.
    """

    __slots__ = ()

    uses_forecasts: ClassVar[bool] = False

    def observe(self, reports: Reports, paces: FloatArray, measured: BoolArray) -> None:
        """Take in one iteration, oldest first. Only workers marked in `measured`, bool of shape [workers], count.

        `paces` has the microseconds per sample, shape [workers].
        """

    @abstractmethod
    def speeds(self) -> FloatArray:
        """The speeds of the next iteration in any unit, > 0, of shape [workers]; for several guesses, one row each.

        Called once every worker has been measured.
        """

    def recall(self, known: Sequence[tuple[Self, int] | None]) -> bool:
        """Take over what other experts of this kind know: for each worker, its expert and the worker's index there.

        Returns whether it can predict now. If not, sizes start equal when workers come or go.
        """
        return False


def require_speeds(expert: Expert, speeds: FloatArray, workers: int) -> None:
    """Check what `speeds` of a user's expert gave.

    Raises:
        ConfigError: It is not a number > 0 for each worker; the message names the expert.
    """
    found: object = speeds
    right = isinstance(found, np.ndarray) and found.dtype == np.float64 and found.shape[-1:] == (workers,)
    if not right or not (np.isfinite(speeds) & (speeds > 0)).all():
        raise ConfigError(
            f"speeds() of the expert {type(expert).__name__} gave {shown(found)}: return {workers} finite float64"
            " above 0, one for each worker"
        )


@final
@dataclass(slots=True)
class Averages(Expert):
    """Exponential averages of each worker's pace: fast ones follow it, and slow ones average noise out.

    The weights are max(1/n, weight) in a worker's n-th measured iteration, so an average starts as a plain mean. With
    weight 1 it is the last pace: the memoryless baseline of LB-BSP's comparison.

    Raises:
        ConfigError: A weight is not in (0, 1].
    """

    workers: int
    weights: tuple[float, ...] = (1.0, 0.5, 0.2, 0.07, 0.02)
    _levels: FloatArray = field(init=False)
    _counts: IntArray = field(init=False)

    def __post_init__(self) -> None:
        if not self.weights or not all(0.0 < weight <= 1.0 for weight in self.weights):
            raise ConfigError(f"averages cannot give their newest value weights of {self.weights}: use 0 < weight <= 1")
        self._levels = np.zeros((len(self.weights), self.workers))
        self._counts = np.zeros(self.workers, dtype=np.int64)

    def observe(self, reports: Reports, paces: FloatArray, measured: BoolArray) -> None:
        self._counts = self._counts + measured
        weights = np.maximum(np.array(self.weights)[:, None], 1.0 / np.maximum(self._counts, 1))
        levels = self._levels + weights * (paces - self._levels)
        self._levels = levels if np.logical_and.reduce(measured) else np.where(measured, levels, self._levels)

    def speeds(self) -> FloatArray:
        return np.asarray(1.0 / self._levels)

    def recall(self, known: Sequence[tuple[Self, int] | None]) -> bool:
        """A worker unknown to all experts starts at the median of the others, which its first iteration replaces."""
        for worker, source in enumerate(known):
            if source is not None:
                expert, index = source
                self._levels[:, worker], self._counts[worker] = expert._levels[:, index], expert._counts[index]
        there = self._levels[0] > 0
        if there.any():
            self._levels[:, ~there] = [[median(each)] for each in self._levels[:, there].tolist()]
        return bool(there.any())


@final
@dataclass(frozen=True, slots=True)
class Even(Expert):
    """Predicts that all workers are equally fast: where that costs least, sizes stay equal."""

    workers: int

    def speeds(self) -> FloatArray:
        return np.array([1.0] * self.workers)

    def recall(self, known: Sequence[tuple[Self, int] | None]) -> bool:
        return True


@final
@dataclass(slots=True)
class Forecasts(Expert):
    """Each worker's forecast of itself (`Narx`); its last pace while it has no forecast."""

    uses_forecasts: ClassVar[bool] = True

    workers: int
    _last: Averages = field(init=False)

    def __post_init__(self) -> None:
        self._last = Averages(self.workers, weights=(1.0,))

    def observe(self, reports: Reports, paces: FloatArray, measured: BoolArray) -> None:
        forecast = reports.forecast > 0
        self._last.observe(reports, np.where(forecast, reports.forecast / 1000.0, paces), measured | forecast)

    def speeds(self) -> FloatArray:
        return self._last.speeds()

    def recall(self, known: Sequence[tuple[Self, int] | None]) -> bool:
        return self._last.recall([each and (each[0]._last, each[1]) for each in known])
