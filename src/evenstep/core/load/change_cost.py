"""What a change of sizes costs, in iterations, as measured in the run: compilation, kernel search, allocation."""

import math
from dataclasses import dataclass, field
from typing import final

import numpy as np

from evenstep.core.state import Stateful
from evenstep.core.values import IntArray


@final
@dataclass(slots=True, kw_only=True)
class ChangeCost(Stateful):
    """Measures how much longer the first iteration at sizes never used before takes than the second at the same sizes.

    Both iterations have the same sizes, so no model of time is needed. The lower median of the workers that have never
    used their size before says whether there is a cost, since a compiler delays all of them, and a slowdown that ends
    delays one. If there is, the longest delay counts, for which all wait. The cost is the lower median of the latest
    measurements less `sure` standard errors. So noise is not taken for a cost, but a single compilation is.

    The first iteration of a process pays for much besides its sizes. So the first sizes are not measured, unless it is
    known that the device `compiles`; but if they cost nothing, no sizes are kept in order to be measured.

    Args:
        compiles: Whether a first iteration at new sizes takes long because it compiles, also at the start of a run.
        tries: New sizes are kept for two iterations until so many of them have been measured, or twice as many used.
        negligible: In iterations. After a measurement below it, sizes are not kept in order to be measured.
        noise: The relative standard deviation of an iteration's time until it has been measured.
        sure: How many standard errors a cost must be above 0.
        window: How many measurements the cost rests on.
        gains: The part of an iteration that sizes used before must save.
        remembered: So many changes to new sizes count as used before.

    Attributes:
        iterations: The cost; 0 as long as none was noticed.
    """

    compiles: bool = False
    tries: int = 8
    negligible: float = 0.1
    noise: float = 0.3
    sure: float = 2.0
    window: int = 16
    gains: float = 0.05
    remembered: int = 64
    iterations: float = field(init=False, default=0.0)
    _excesses: list[float] = field(init=False, default_factory=list)
    _scatter: list[float] = field(init=False, default_factory=list)
    _used: IntArray = field(init=False, default_factory=lambda: np.zeros((0, 0), dtype=np.int64))  # Latest first.
    _times: int = field(init=False, default=0)  # How often there was something new among the sizes.
    _samples: IntArray = field(init=False, default_factory=lambda: np.zeros(0, dtype=np.int64))
    _microseconds: IntArray = field(init=False, default_factory=lambda: np.zeros(0, dtype=np.int64))
    _changed: IntArray = field(init=False, default_factory=lambda: np.zeros(0, dtype=np.int64))  # To a new size.
    _quiet: bool = field(init=False, default=False)  # Whether the first sizes cost nothing.
    _usual: float = field(init=False, default=0.0)  # Microseconds of an iteration that is no first use, on average.
    _same: int = field(init=False, default=0)  # Iterations in a row with the present sizes.

    @property
    def first_use(self) -> bool:
        """Whether the last iteration was the first at its sizes."""
        return len(self._changed) > 0 and self._same == 1

    def free(self, weights: IntArray) -> IntArray | None:
        """The sizes used before that fit these weights best, if they take less by more than `gains`."""
        took = (self._used / weights).max(axis=1)
        took[self._used.sum(axis=1) != self._samples.sum()] = math.inf
        best = int(took.argmin())
        return self._used[best] if took[best] < (1.0 - self.gains) * (self._samples / weights).max() else None

    @property
    def price(self) -> float:
        """The cost, or `noise` as long as nothing was measured and something can be."""
        return self.iterations if self._excesses or self.known else self.noise

    @property
    def known(self) -> bool:
        """Whether enough was measured, or cannot be measured because no sizes come twice in a row."""
        if not self._excesses:
            return self._quiet or self._times >= 2 * self.tries
        return len(self._excesses) >= self.tries or abs(self._excesses[-1]) < self.negligible

    def observe(self, samples: IntArray, microseconds: IntArray) -> None:
        """Take in one iteration of all workers, oldest first; int64 of shape [workers] each."""
        if np.array_equal(samples, self._samples):
            self._same += 1
            if len(self._changed) or self._same > 2:
                self._measure(microseconds)
        else:
            if self._used.shape[1:] != samples.shape:
                self._used = np.zeros((0, len(samples)), dtype=np.int64)
            self._changed = np.flatnonzero((self._used != samples).all(axis=0))
            self._same, self._samples = 1, samples
            if len(self._changed):
                self._times += 1
                self._used = np.concatenate([samples[np.newaxis], self._used[: self.remembered - 1]])
        longest = int(np.maximum.reduce(microseconds))
        if not self.first_use:
            self._usual += (longest - self._usual) * (0.2 if self._usual else 1.0)
        self._microseconds = microseconds

    def _measure(self, now: IntArray) -> None:
        """Compare this iteration with the one before it, which had the same sizes."""
        shorter = self._microseconds - now
        chosen = shorter[self._changed] if self._same == 2 else shorter
        middle = (len(chosen) - 1) // 2
        unit = max(min(float(np.maximum.reduce(now)), self._usual or math.inf), 1.0)
        excess = int(np.partition(chosen, middle)[middle]) / unit
        first = self._times == 1
        if excess > self.noise and (self._same == 2 or first) and (self.compiles or not first):
            self._add(int(chosen.max()) / unit)
        elif self._same > 2:
            self._scatter = [*self._scatter, abs(excess)][-4 * self.window :]
        elif first:
            self._quiet = abs(excess) < self.negligible
        else:
            self._add(excess)

    def _add(self, excess: float) -> None:
        self._excesses = [*self._excesses, excess][-self.window :]
        usual = sorted(self._scatter)[len(self._scatter) // 2] if len(self._scatter) >= 4 else self.noise
        found = sorted(self._excesses)[(len(self._excesses) - 1) // 2]
        self.iterations = max(found - self.sure * usual / math.sqrt(len(self._excesses)), 0.0)
