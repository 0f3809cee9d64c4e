"""Whether the iterations so far show that other sizes would have been better, or only that times vary."""

from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import isqrt
from typing import Final, final

import numpy as np

from evenstep.core.load.solver import TimeModels
from evenstep.core.state import Stateful
from evenstep.core.values import IntArray

_WINDOW: Final = 64
_LEAST: Final = 2
_WHILE: Final = 16

_SURE: Final = 3
_LIKELY: Final = 2
_TOLERANCE: Final = 5_000
_MARGIN: Final = 10
_LARGEST_MARGIN: Final = 300_000
_BLOCKS: Final = (1, 2, 4, 8)
_FEWEST: Final = 4
_QUARTER: Final = 4
_EIGHTH: Final = 8
_CAP: Final = 8
_PPM: Final = 1_000_000
_LARGEST_LOAD: Final = 10**9
_LONGEST: Final = 9 * 10**9


@final
@dataclass(slots=True)
class Evidence(Stateful):
    """A test of proposed sizes on the latest iterations of all workers.

    Short iterations come in blocks (`Block`), each of which counts as one iteration here. A worker's *load* in an
    iteration is its measured time over the one that its time model gives for the size that it
    had. Under these loads the models give the time of that iteration with the present and with the proposed sizes, and
    so what the proposed sizes would have gained in it, in millionths of the longer of both times.

    The mean gain of the last n iterations is compared with what such a mean varies by, which is measured at several
    lengths: noise that comes in bursts counts for more than the same noise without. A large gain is proven in two or
    three iterations, a small one in tens.

    Attributes:
        window: Samples and compute microseconds of the latest iterations, oldest first, each of shape [2, workers].
    """

    window: list[IntArray] = field(init=False, default_factory=list)

    def observe(self, row: IntArray) -> None:
        """Take in one iteration, or the mean of a block of them (`Block`)."""
        if self.window and self.window[-1].shape != row.shape:
            self.window.clear()
        self.window.append(row)
        del self.window[:-_WINDOW]

    def proves(self, times: TimeModels, present: IntArray, proposed: IntArray) -> bool:
        """Whether the proposed sizes would have been better; True if too few iterations are known to judge.

        The mean gain of the last n >= 2 iterations must be three times what it varies by. The sum must also be ten
        times what one gain varies by (but no more than 0.3), times the root of n: of slow changes of load, the
        variation within the window shows too little.
        """
        gains, variation = self._gains(times, present, proposed)
        if not variation:
            return True
        margin = min(_MARGIN * variation[1], _LARGEST_MARGIN)
        return any(
            total > 0 and total >= _SURE * count * _of_mean(variation, count) and total * total >= margin**2 * count
            for count, total in _sums(gains)
        )

    def allows(self, times: TimeModels, present: IntArray, proposed: IntArray) -> bool:
        """Whether the proposed sizes, preferred for other reasons, were no worse in 16 iterations, or seem better.

        They seem better if the mean gain of the last n >= 2 iterations is twice what it varies by. They were no worse
        if it is not below zero by more than that variation, or by 0.5 %.
        """
        gains, variation = self._gains(times, present, proposed)
        if not variation:
            return False
        sums = _sums(gains[-_WHILE:])
        if any(total > 0 and total >= _LIKELY * count * _of_mean(variation, count) for count, total in sums):
            return True
        count, total = sums[-1] if sums else (0, 0)
        return count == _WHILE and total >= -count * max(_of_mean(variation, count), _TOLERANCE)

    def _gains(self, times: TimeModels, present: IntArray, proposed: IntArray) -> tuple[list[int], dict[int, int]]:
        """What the proposed sizes would have gained, by iteration, oldest first, and what means of gains vary by.

        Where a size would be more than halved or doubled, only iterations at about the present sizes count, since at
        other sizes a wrong fixed part looks like a gain. What gains vary by is taken from the load of the worker that
        is the last, relative to all: gains are limited where another worker becomes the last.
        """
        if not self.window:
            return [], {}
        now, then = times.nanoseconds(present), times.nanoseconds(proposed)
        unit = max(int(now.max()), 1)
        now, then = (np.minimum(each * _PPM // unit, _LARGEST_LOAD) for each in (now, then))
        rows = np.array(self.window)
        expected = np.maximum([times.nanoseconds(samples) for samples in rows[:, 0]], 1)
        loads = np.minimum(np.minimum(rows[:, 1], _LONGEST) * 1000 * _PPM // expected, _LARGEST_LOAD)
        before, after = (loads * now).max(axis=1) // _PPM, (loads * then).max(axis=1) // _PPM
        gains = (before - after) * _PPM // np.maximum(np.maximum(before, after), 1)
        relative = loads[:, int(now.argmax())] * _PPM * len(now) // np.maximum(loads.sum(axis=1), 1)
        leap = ((2 * proposed < present) | (proposed > 2 * present)).any()
        first = _first_alike(rows[:, 0], present) if leap else 0
        return gains[first:].tolist(), _variation(relative.tolist())


def _first_alike(sizes: IntArray, present: IntArray) -> int:
    """The first of the latest iterations in which no share of the batch differed by an eighth of an equal one."""
    totals, total = sizes.sum(axis=1, keepdims=True), int(present.sum())
    apart = np.abs(sizes * total - present * totals) * (_EIGHTH * len(present)) > totals * total
    others = np.flatnonzero(apart.any(axis=1))
    return int(others[-1]) + 1 if len(others) else 0


def _sums(gains: list[int]) -> list[tuple[int, int]]:
    """The sums of the last n gains, n from 2 up, with n."""
    return list(enumerate(accumulate(reversed(gains)), start=1))[_LEAST - 1 :]


def _variation(loads: list[int]) -> dict[int, int]:
    """The standard deviation of a mean of loads, by their number; empty if too few are known.

    From the differences of neighbouring means. A change of speed is no noise: each counts as at most eight times their
    lower quartile.
    """
    found: dict[int, int] = {}
    for length in _BLOCKS:
        means = [sum(loads[end - length : end]) // length for end in range(len(loads), length - 1, -length)]
        differences = sorted(abs(one - other) for one, other in pairwise(means))
        if len(differences) < _FEWEST:
            break
        most = _CAP * max(differences[len(differences) // _QUARTER], 1)
        found[length] = isqrt(sum(min(each, most) ** 2 for each in differences) // (2 * len(differences)))
    return found


def _of_mean(variation: dict[int, int], count: int) -> int:
    """The same for any number: from the length for which it is largest."""
    return max(each if length >= count else isqrt(each * each * length // count) for length, each in variation.items())
