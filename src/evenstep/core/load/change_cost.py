"""The cost of a change of sizes, in iterations, measured in the run: compilation, kernel search, allocation."""

import math
from dataclasses import dataclass, field
from typing import final

import numpy as np

from evenstep.core.state import Stateful
from evenstep.core.values import IntArray

# In every iteration, and array methods are two calls more.
_largest, _total, _all = np.maximum.reduce, np.add.reduce, np.logical_and.reduce


@final
@dataclass(slots=True, kw_only=True)
class ChangeCost(Stateful):
    """Measures how much longer the first iteration at sizes never used before takes than the second at the same sizes.

    Both iterations have the same sizes, so no model of time is needed. The lower median over the workers whose size is
    new says whether there is a cost, since a compiler delays all of them, whereas a slowdown that ends delays one. If
    there is a cost, the longest delay counts, because all wait for it. The cost is the lower median of the latest
    measurements less `sure` standard errors. So noise is not taken for a cost, but a single compilation is.

    The first iteration of a process pays for much besides its sizes. So the first sizes are not measured, unless it is
    known that the device `compiles`. If they cost nothing, though, no sizes are kept just to be measured.

    Args:
        compiles: Whether a first iteration at new sizes takes long because it compiles, also at the start of a run.
        tries: New sizes are kept for two iterations until this many have been measured, or twice as many used.
        negligible: In iterations. After a measurement below it, sizes are not kept just to be measured.
        noise: The relative standard deviation of an iteration's time until it has been measured.
        sure: How many standard errors a cost must be above 0.
        window: The number of latest measurements used.
        gains: The fraction of an iteration that previously used sizes must save.
        remembered: The number of latest changes to new sizes that count as used before.

    Attributes:
        iterations: The cost; 0 while none was noticed.
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
    _times: int = field(init=False, default=0)  # The number of times that any size was new.
    _samples: IntArray = field(init=False, default_factory=lambda: np.zeros(0, dtype=np.int64))
    _microseconds: IntArray = field(init=False, default_factory=lambda: np.zeros(0, dtype=np.int64))
    _changed: IntArray = field(init=False, default_factory=lambda: np.zeros(0, dtype=np.int64))  # To a new size.
    _quiet: bool = field(init=False, default=False)  # Whether the first sizes cost nothing.
    _usual: float = field(init=False, default=0.0)  # Mean microseconds of an iteration that is not a first use.
    _same: int = field(init=False, default=0)  # Iterations in a row with the present sizes.

    def free(self, weights: IntArray) -> IntArray | None:
        """The previously used sizes that fit these weights best, if they save more than `gains`."""
        took = _largest(self._used / weights, axis=1)
        took[_total(self._used, axis=1) != _total(self._samples)] = math.inf
        best = int(took.argmin())
        return self._used[best] if took[best] < (1.0 - self.gains) * _largest(self._samples / weights) else None

    @property
    def price(self) -> float:
        """The cost, or `noise` while nothing has been measured but can still be."""
        return self.iterations if self._excesses or self.known else self.noise

    @property
    def known(self) -> bool:
        """True if enough was measured, or nothing can be because no sizes come twice in a row."""
        if not self._excesses:
            return self._quiet or self._times >= 2 * self.tries
        return len(self._excesses) >= self.tries or abs(self._excesses[-1]) < self.negligible

    def observe(self, samples: IntArray, microseconds: IntArray) -> bool:
        """Take in one iteration of all workers, oldest first; int64 of shape [workers] each.

        Returns whether it was the first at its sizes.
        """
        if samples.tolist() == self._samples.tolist():
            self._same += 1
            if len(self._changed) or self._same > 2:
                self._measure(microseconds)
        else:
            if self._used.shape[1:] != samples.shape:
                self._used = np.zeros((0, len(samples)), dtype=np.int64)
            self._changed = _all(self._used != samples, axis=0).nonzero()[0]
            self._same, self._samples = 1, samples
            if len(self._changed):
                self._times += 1
                self._used = np.concatenate([samples[np.newaxis], self._used[: self.remembered - 1]])
        first_use = len(self._changed) > 0 and self._same == 1
        if not first_use:
            longest = max(microseconds.tolist())
            self._usual += (longest - self._usual) * (0.2 if self._usual else 1.0)
        self._microseconds = microseconds
        return first_use

    def _measure(self, now: IntArray) -> None:
        """Compare this iteration with the previous one, which had the same sizes."""
        shorter = self._microseconds - now
        chosen = sorted((shorter[self._changed] if self._same == 2 else shorter).tolist())
        unit = max(min(float(max(now.tolist())), self._usual or math.inf), 1.0)
        excess = chosen[(len(chosen) - 1) // 2] / unit
        first = self._times == 1
        if excess > self.noise and (self._same == 2 or first) and (self.compiles or not first):
            self._add(chosen[-1] / unit)
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
