"""Batch sizes in step with predicted speed, so that all workers finish together: LB-BSP."""

from dataclasses import dataclass, fields
from typing import Final, Literal, Self, cast, final

import numpy as np

from evenstep.core.errors import ConfigError
from evenstep.core.load.allocate.bounds import Bounds
from evenstep.core.load.allocate.shares import share_out
from evenstep.core.load.allocate.solver import reachable, solve
from evenstep.core.load.base import LoadPolicy
from evenstep.core.load.equal import equal_sizes
from evenstep.core.load.estimate import Estimator
from evenstep.core.load.predict import PREDICTORS
from evenstep.core.load.times.affine import Affine
from evenstep.core.load.times.base import TimeModels
from evenstep.core.load.times.flat_start import FlatStart
from evenstep.core.load.times.proportional import ThroughOrigin
from evenstep.core.load.times.shape import Shape
from evenstep.core.values import Allocation, IntArray, Problem, Reports, State

_ERRORS_TO_MOVE: Final = 3
_SPEED_UNIT: Final = 2**62
_PPM: Final = 1_000_000
_REMEMBERED: Final = 2


@final
class PredictedPolicy:
    """LB-BSP (arXiv 1806.02508; SoCC'20): x_i = X * v_i / sum(v) on predicted speeds v, or the solver on time models.

    The proportional form is the paper's for CPU clusters and is used where no worker has a fixed part; otherwise sizes
    minimise the largest predicted time (its problem for GPU clusters). Until every worker has an estimate, sizes are
    equal.

    Deviation: the paper applies every new solution. Here sizes stay as they are unless the predicted time of the
    iteration falls by more than `min_gain` and by more than three times the largest relative error of the estimates, so
    that noise does not move them. Sizes of the last two global batch sizes are remembered, so that an epoch's short
    last slice does not disturb the others.

    Everything is decided from the reported integers, in integers, so that all workers decide alike.
    """

    __slots__ = ("_min_gain_ppm", "_rates", "_remembered")

    def __init__(self, *, min_gain: float = 0.015) -> None:
        self._min_gain_ppm = round(min_gain * _PPM)
        self._rates: _Rates | None = None
        self._remembered: list[IntArray] = []

    def observe(self, reports: Reports) -> None:
        """Take in what all workers reported of one iteration; each worker's newest estimate counts alone.

        A worker that has none keeps the one before: it has resumed from the checkpoint of another, say.
        """
        rates = _Rates(
            per_sample=reports.nanoseconds_per_sample,
            fixed=reports.fixed_nanoseconds,
            error_ppm=reports.error_ppm,
            flat=reports.flat_size,
        )
        self._rates = rates if self._rates is None else rates.completed_by(self._rates)

    def allocate(self, problem: Problem) -> Allocation:
        """The sizes of the next iteration; ConfigError where the problem's limits admit none."""
        present = next((sizes for sizes in self._remembered if _satisfies(sizes, problem)), None)
        sizes = self._decide(problem, present)
        others = [past for past in self._remembered if past is not present and past.sum() != sizes.sum()]
        self._remembered = [sizes, *others][:_REMEMBERED]
        return Allocation(sizes=sizes.copy())

    def state_dict(self) -> State:
        rates = self._rates
        return {
            "sizes": [sizes.tolist() for sizes in self._remembered],
            "rates": None if rates is None else {f.name: getattr(rates, f.name).tolist() for f in fields(rates)},
        }

    def load_state_dict(self, state: State) -> None:
        """Go on where the given state was taken; with another number of workers, as if nothing were known."""
        self._remembered = [np.array(sizes, dtype=np.int64) for sizes in cast("list[list[int]]", state["sizes"])]
        rates = cast("dict[str, list[int]] | None", state["rates"])
        if rates is None:
            self._rates = None
        else:
            self._rates = _Rates(**{name: np.array(column, dtype=np.int64) for name, column in rates.items()})

    def _decide(self, problem: Problem, present: IntArray | None) -> IntArray:
        rates = self._rates
        if rates is None or len(rates.per_sample) != problem.workers or not rates.per_sample.all():
            return equal_sizes(problem)
        bounds = Bounds.of(problem.global_batch_size, problem.minimum, problem.maximum, problem.multiple)
        times = rates.times()
        if present is None:
            return _plan(times, bounds)
        makespan = int(times.nanoseconds(present).max())
        gain_ppm = max(self._min_gain_ppm, _ERRORS_TO_MOVE * int(rates.error_ppm.max()))
        goal = makespan * max(_PPM - gain_ppm, 0) // _PPM
        if not reachable(times, bounds, goal):
            return present
        sizes = _plan(times, bounds)
        # Whole samples can keep the proportional sizes from the gain that the solver could reach.
        return sizes if int(times.nanoseconds(sizes).max()) < makespan else present


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """LB-BSP: sizes in step with predicted speed.

    `predictor` is a name of `PREDICTORS`; `times` says whether a worker's time is in proportion to its size or may have
    a fixed part; sizes move only for a predicted gain of more than `min_gain` (0.015: one and a half per cent).
    """

    predictor: str = "change"
    times: Literal["affine", "proportional"] = "affine"
    minimum: int | None = None
    maximum: int | None = None
    multiple: int = 1
    warmup: int = 2
    min_gain: float = 0.015

    def __post_init__(self) -> None:
        if self.predictor not in PREDICTORS:
            raise ConfigError(f"there is no predictor {self.predictor!r}: use one of {', '.join(sorted(PREDICTORS))}")
        if self.times not in ("affine", "proportional"):
            raise ConfigError(f"there is no time model {self.times!r}: use affine or proportional")
        if self.multiple < 1:
            raise ConfigError(f"sizes cannot be multiples of {self.multiple}: use a multiple of at least 1")
        if self.warmup < 0:
            raise ConfigError(f"a warm-up of {self.warmup} iterations is not possible: use 0 or more")
        if not 0.0 <= self.min_gain < 1.0:
            raise ConfigError(f"sizes cannot wait for a gain of {self.min_gain}: use 0 <= min_gain < 1")

    def policy(self, workers: int) -> LoadPolicy:
        """A new policy for this many workers."""
        return PredictedPolicy(min_gain=self.min_gain)

    def estimator(self) -> Estimator:
        """A new estimator of one worker's speed."""
        shape = Shape() if self.times == "affine" else None
        return Estimator(PREDICTORS[self.predictor], shape=shape, warmup=self.warmup)


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Rates:
    """The part of the newest reports that decisions rest on: int64 arrays of shape [workers]."""

    per_sample: IntArray
    fixed: IntArray
    error_ppm: IntArray
    flat: IntArray

    def times(self) -> TimeModels:
        """How long each worker takes for a size."""
        flat = bool(self.flat.any())
        if not flat and not self.fixed.any():
            return ThroughOrigin(nanoseconds_per_sample=self.per_sample)
        lines = Affine(fixed_nanoseconds=self.fixed, nanoseconds_per_sample=self.per_sample)
        return FlatStart(times=lines, flat_size=self.flat) if flat else lines

    def completed_by(self, earlier: Self) -> Self:
        """These rates, with the earlier ones of workers that have none now; of as many workers, or not at all."""
        known = self.per_sample > 0
        if known.all() or len(known) != len(earlier.per_sample):
            return self
        return type(self)(
            **{f.name: np.where(known, getattr(self, f.name), getattr(earlier, f.name)) for f in fields(self)}
        )


def _plan(times: TimeModels, bounds: Bounds) -> IntArray:
    """The sizes that the paper gives, from scratch."""
    if isinstance(times, ThroughOrigin):
        return share_out(bounds, _SPEED_UNIT // times.nanoseconds_per_sample)
    return solve(times, bounds)


def _satisfies(sizes: IntArray, problem: Problem) -> bool:
    """Whether sizes decided earlier still satisfy the problem."""
    return (
        len(sizes) == problem.workers
        and int(sizes.sum()) == problem.global_batch_size
        and bool(((problem.minimum <= sizes) & (sizes <= problem.maximum)).all())
        and (problem.multiple == 1 or not (sizes % problem.multiple).any())
    )
