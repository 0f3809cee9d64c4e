"""What a change of sizes costs, in iterations, as measured in the run: compilation, kernel search, allocation."""

import math
import zlib
from dataclasses import dataclass, field
from typing import Final, final

import numpy as np

from evenstep.core.state import Stateful
from evenstep.core.values import IntArray

_REMEMBERED: Final = 256
"""Sizes that count as used before. Whoever changes sizes more often than that pays little for it."""


@final
@dataclass(slots=True, kw_only=True)
class ChangeCost(Stateful):
    """Measures how much longer the first iteration at sizes never used before takes than the second at the same sizes.

    Both iterations have the same sizes, so no model of time is needed. The lower median of the workers whose size has
    changed says whether there is a cost, since a compiler delays all of them, and a slowdown that ends delays one. If
    there is, the longest delay counts, for which all wait. The cost is the lower median of the latest measurements less
    `sure` standard errors. So noise is not taken for a cost, but a single compilation is.

    The first iteration of a process pays for much besides its sizes. So the first sizes are not measured, unless it is
    known that the device `compiles`; but if they cost nothing, no sizes are kept in order to be measured.

    Args:
        compiles: Whether a first iteration at new sizes takes long because it compiles, also at the start of a run.
        tries: New sizes are kept for two iterations until so many of them have been measured, or twice as many used.
        negligible: In iterations. After a measurement below it, sizes are not kept in order to be measured.
        noise: The relative standard deviation of an iteration's time until it has been measured.
        sure: How many standard errors a cost must be above 0.
        window: How many measurements the cost rests on.

    Attributes:
        iterations: The cost; 0 as long as none was noticed.
    """

    compiles: bool = False
    tries: int = 8
    negligible: float = 0.1
    noise: float = 0.3
    sure: float = 2.0
    window: int = 16
    iterations: float = field(init=False, default=0.0)
    _excesses: list[float] = field(init=False, default_factory=list)
    _scatter: list[float] = field(init=False, default_factory=list)
    _used: list[int] = field(init=False, default_factory=list)  # Checksums of sizes.
    _samples: IntArray = field(init=False, default_factory=lambda: np.zeros(0, dtype=np.int64))
    _microseconds: IntArray = field(init=False, default_factory=lambda: np.zeros(0, dtype=np.int64))
    _changed: IntArray = field(init=False, default_factory=lambda: np.zeros(0, dtype=np.int64))  # Workers.
    _quiet: bool = field(init=False, default=False)  # Whether the first sizes cost nothing.
    _usual: float = field(init=False, default=0.0)  # Microseconds of an iteration that is no first use, on average.
    _same: int = field(init=False, default=0)  # Iterations in a row with the present sizes.
    _new: bool = field(init=False, default=False)  # Whether these had never been used before.

    @property
    def first_use(self) -> bool:
        """Whether the last iteration was the first at its sizes."""
        return self._new and self._same == 1

    @property
    def noticed(self) -> bool:
        """Whether anything was measured, or can be."""
        return bool(self._excesses) or self.known

    @property
    def known(self) -> bool:
        """Whether enough was measured, or cannot be measured because no sizes come twice in a row."""
        if not self._excesses:
            return self._quiet or len(self._used) >= 2 * self.tries
        return len(self._excesses) >= self.tries or abs(self._excesses[-1]) < self.negligible

    def observe(self, samples: IntArray, microseconds: IntArray) -> None:
        """Take in one iteration of all workers, oldest first; int64 of shape [workers] each."""
        if np.array_equal(samples, self._samples):
            self._same += 1
            if self._new or self._same > 2:
                self._measure(microseconds)
        else:
            known = len(samples) == len(self._samples)
            self._changed = np.flatnonzero(samples != self._samples) if known else np.arange(len(samples))
            mark = zlib.crc32(samples.tobytes())
            self._new, self._same, self._samples = mark not in self._used, 1, samples
            if self._new:
                self._used = [*self._used, mark][-_REMEMBERED:]
        longest = int(np.maximum.reduce(microseconds))
        if not self.first_use:
            self._usual += (longest - self._usual) * (0.2 if self._usual else 1.0)
        self._microseconds = microseconds

    def _measure(self, now: IntArray) -> None:
        """Compare this iteration with the one before it, which had the same sizes."""
        shorter = self._microseconds - now
        chosen = shorter[self._changed] if self._same == 2 else shorter
        middle = (len(chosen) - 1) // 2
        unit = max(min(float(now.max()), self._usual or math.inf), 1.0)
        excess = int(np.partition(chosen, middle)[middle]) / unit
        first = len(self._used) == 1
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
