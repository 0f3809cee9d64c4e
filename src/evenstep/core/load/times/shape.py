"""Finds how one worker's time depends on its batch size, up to its speed, from the iterations as they come."""

import math
from collections.abc import Sequence
from typing import Final, cast, final

from evenstep.core.load.predict.change import Change, Verdict
from evenstep.core.load.predict.ema import Ema
from evenstep.core.load.predict.sample_state import sample_from_state, sample_to_state
from evenstep.core.load.times.line import MIN_ELASTICITY, MIN_SPREAD, Line
from evenstep.core.values import Sample, State

_WINDOW: Final = 32
_LARGEST_ERROR: Final = 0.2
_LARGEST_FLAT_ERROR: Final = 0.1
_SIGNIFICANT: Final = 3.0
_MIN_STEP: Final = 0.01
_MIN_FLAT_STEP: Final = 1.5


@final
class Shape:
    """Fits c and f in t = s * (c + max(x, f)): x samples take s seconds for each of c + max(x, f) effective ones.

    c, the fixed part, is the least-squares line's intercept over its slope, on the recent iterations of the present
    regime of speed. It is counted in samples so that a slowdown, which scales s, leaves it alone. c moves only
    where the sizes have spread enough against the noise and the line differs from the present c by what noise
    cannot explain; it starts at 0 (a line through the origin) and is kept between 0 and ten times the batch size.

    A change of size with a wrong shape looks like a change of speed. It is taken for what it is where one line
    explains the times on both sides of it, and for a change of speed otherwise.

    f, the flat start, is the largest size at which the device is known not to be full, and 0 as long as there is
    none. It is learned only from a change of size by half or more that no line explains and whose two sides take
    equally long, by small errors: a tile's edge or a drop in a measured curve is no flat start, and sizes that
    follow a drift of speed change by too little at once. A change of speed that offsets such a change of size in
    the same iteration is taken for one, though. f is forgotten where smaller sizes turn out to take less time, or
    where no shape explains the next change of size to or from one of them.

    LB-BSP's first version profiles each device beforehand; fitting on line is ours.
    """

    __slots__ = ("_doubtful", "_fixed", "_flat", "_regime", "_window")

    def __init__(self) -> None:
        self._fixed = 0.0
        self._flat = 0.0
        self._window: list[Sample] = []
        self._doubtful: Sample | None = None
        self._regime = Change(Ema(alpha=1.0 / _WINDOW))

    @property
    def fixed_samples(self) -> float:
        """The fixed part c, in samples."""
        return self._fixed

    @property
    def flat_samples(self) -> float:
        """The flat start f, in samples; 0 for none."""
        return self._flat

    @property
    def window(self) -> tuple[Sample, ...]:
        """The recent iterations of the present regime, oldest first, outliers left out."""
        return tuple(self._window)

    def effective(self, sample: Sample) -> Sample:
        """The iteration with its effective samples."""
        return Sample(
            samples=self._fixed + max(sample.samples, self._flat),
            compute_seconds=sample.compute_seconds,
            factors=sample.factors,
        )

    def observe(self, sample: Sample) -> bool:
        """Take in one measured iteration, oldest first; True where that changed the shape.

        Whoever predicts from effective samples then has to start afresh, from `window`.
        """
        verdict = self._regime.judge(self.effective(sample))
        doubtful, self._doubtful = self._doubtful, None
        if verdict is Verdict.DOUBTFUL:
            self._doubtful = sample
            return False
        if verdict is Verdict.USUAL:
            self._window = [*self._window, sample][-_WINDOW:]
            return self._refit()
        fresh = [doubtful, sample] if verdict is Verdict.CHANGED and doubtful is not None else [sample]
        before, self._window = self._window, fresh
        return self._explain(before, fresh)

    def state_dict(self) -> State:
        """Everything that `load_state_dict` needs to go on bit for bit."""
        return {
            "fixed": self._fixed,
            "flat": self._flat,
            "window": [sample_to_state(sample) for sample in self._window],
            "doubtful": None if self._doubtful is None else sample_to_state(self._doubtful),
            "regime": self._regime.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        """Go on where the given state was taken."""
        self._fixed = cast("float", state["fixed"])
        self._flat = cast("float", state["flat"])
        self._window = [sample_from_state(sample) for sample in cast("list[State]", state["window"])]
        doubtful = cast("State | None", state["doubtful"])
        self._doubtful = None if doubtful is None else sample_from_state(doubtful)
        self._regime.load_state_dict(cast("State", state["regime"]))

    def _refit(self) -> bool:
        """Move c or f where the window tells to."""
        if self._flat and self._slopes_below():
            return self._adopt(self._fixed, 0.0)
        line = Line.through(self._window, self._regime.noise, flat=self._flat)
        if line is None or line.error > _LARGEST_ERROR:
            return False
        # A line beyond the limits of c says no more than that c is large, or small.
        present = max(line.size / (line.size + self._fixed), MIN_ELASTICITY)
        step = abs(max(line.elasticity, MIN_ELASTICITY) - present)
        if step < max(_SIGNIFICANT * line.error, _MIN_STEP):
            return False
        return self._adopt(line.fixed_samples, self._flat)

    def _explain(self, before: list[Sample], fresh: list[Sample]) -> bool:
        """Find the shape that has the iterations before a change and after it run at one speed, and adopt it."""
        together = [*before, *fresh][-_WINDOW:]
        noise = self._regime.noise
        for flat in (self._flat, 0.0) if self._flat else (0.0,):
            line = Line.through(together, noise, flat=flat)
            if line is None or line.error > _LARGEST_ERROR or not MIN_ELASTICITY <= line.elasticity <= 1.0:
                continue
            if _jump(before, fresh, line.fixed_samples, flat) <= _SIGNIFICANT * noise:
                self._window = together
                return self._adopt(line.fixed_samples, flat)
        before = _last_run(before)
        if self._level(before, fresh):
            self._window = [*before, *fresh]
            return self._adopt(self._fixed, max(before[-1].samples, fresh[0].samples))
        if not _alike(before[-1], fresh[0]) and min(before[-1].samples, fresh[0].samples) < self._flat:
            return self._adopt(self._fixed, 0.0)
        return False

    def _level(self, before: list[Sample], fresh: list[Sample]) -> bool:
        """Whether two sizes far apart, one of them beyond the flat start, take equally long."""
        sizes = before[-1].samples, fresh[0].samples
        if max(sizes) <= self._flat or max(sizes) < _MIN_FLAT_STEP * min(sizes):
            return False
        noise = self._regime.noise
        line = Line.through([*before, *fresh], noise)
        if line is None or line.error > _LARGEST_FLAT_ERROR or abs(line.elasticity) >= MIN_ELASTICITY:
            return False
        return _jump(before, fresh, 0.0, max(sizes)) <= _SIGNIFICANT * noise

    def _slopes_below(self) -> bool:
        """Whether sizes within the flat start turn out to differ in time."""
        below = [sample for sample in self._window if sample.samples <= self._flat]
        line = Line.through(below, self._regime.noise) if below else None
        return line is not None and line.elasticity > max(_SIGNIFICANT * line.error, MIN_ELASTICITY)

    def _adopt(self, fixed: float, flat: float) -> bool:
        if fixed == self._fixed and flat == self._flat:
            return False
        self._fixed, self._flat = fixed, flat
        self._regime.restart()
        for sample in self._window:
            self._regime.observe(self.effective(sample))
        return True


def _alike(one: Sample, other: Sample) -> bool:
    return abs(one.samples - other.samples) <= MIN_SPREAD * other.samples


def _last_run(samples: list[Sample]) -> list[Sample]:
    """The last iterations that had the same size."""
    first = len(samples) - 1
    while first and _alike(samples[first - 1], samples[-1]):
        first -= 1
    return samples[first:]


def _jump(before: Sequence[Sample], fresh: Sequence[Sample], fixed: float, flat: float) -> float:
    """By how much the speed differs between the two, as a difference of logarithms, under this shape."""

    def rate(samples: Sequence[Sample]) -> float:
        return sum(math.log(s.compute_seconds / (fixed + max(s.samples, flat))) for s in samples) / len(samples)

    return abs(rate(fresh) - rate(before))
