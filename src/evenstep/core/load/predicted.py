"""Batch sizes in step with predicted speed, so that all workers finish together: LB-BSP."""

from dataclasses import dataclass, field, replace
from typing import Final, Literal, final

import numpy as np

from evenstep.core.errors import ConfigError
from evenstep.core.load.base import Load, LoadPolicy
from evenstep.core.load.block import BLOCK_MICROSECONDS, Block
from evenstep.core.load.equal import equal_sizes
from evenstep.core.load.estimate import Estimator
from evenstep.core.load.evidence import Evidence
from evenstep.core.load.levels import Levels
from evenstep.core.load.predict import PREDICTORS
from evenstep.core.load.shape import Shape
from evenstep.core.load.shares import Bounds, share_out
from evenstep.core.load.solver import Lines, reachable, solve
from evenstep.core.values import Allocation, IntArray, Problem, Reports

_ERRORS_TO_MOVE: Final = 3
_SPEED_UNIT: Final = 2**62
_PPM: Final = 1_000_000
_REMEMBERED: Final = 2
_APART: Final = 20


@final
@dataclass(slots=True, kw_only=True)
class PredictedPolicy(LoadPolicy):
    """LB-BSP (arXiv 1806.02508; SoCC'20): x_i = X * v_i / sum(v) on predicted speeds v, or the solver on time models.

    The proportional form is the paper's for CPU clusters and is used if no worker has a fixed part. Otherwise sizes
    minimise the largest predicted time (its problem for GPU clusters). Sizes are equal until every worker has an
    estimate.

    Deviation: the paper applies every new solution. Here sizes stay as they are unless the predicted time of the
    iteration falls by more than `min_gain` and by more than three times the largest relative error of the estimates, so
    that noise does not move them. Sizes of the last two global batch sizes are remembered, so that an epoch's short
    last slice does not disturb the others.

    If `proven`, short iterations are judged in blocks (`Block`), and sizes change at the end of a block only. The
    latest blocks must also show the gain (`Evidence`), and the workers' loads relative to each other must agree
    (`Levels`). Of sizes that take equally long the most equal are taken: at a move, and later too if the latest blocks
    do not speak against it.

    Everything is decided from the reported integers, in integers, so that all workers decide alike.
    """

    min_gain: float = 0.015
    proven: bool = False
    # By worker: nanoseconds per sample, fixed nanoseconds, flat start, relative error in millionths.
    _rates: IntArray | None = field(init=False, default=None)
    _sizes: list[IntArray] = field(init=False, default_factory=list)
    _block: Block = field(init=False, default_factory=Block)
    _evidence: Evidence = field(init=False, default_factory=Evidence)
    _levels: Levels = field(init=False, default_factory=Levels)
    _judged: list[int] = field(init=False, default_factory=list)  # The global batch sizes decided on since a report.

    def observe(self, reports: Reports) -> None:
        """Take in one iteration; only each worker's newest estimate counts.

        A worker without an estimate keeps its earlier one: it may have resumed from another worker's checkpoint.
        """
        rates = np.array(
            (reports.nanoseconds_per_sample, reports.fixed_nanoseconds, reports.flat_size, reports.error_ppm)
        )
        if self._rates is not None and self._rates.shape == rates.shape:
            rates = np.where(rates[0] > 0, rates, self._rates)
        else:
            self._block, self._evidence, self._levels = Block(), Evidence(), Levels()
        self._rates = rates
        if not self.proven:
            self._judged = []
        for row in self._block.add(reports) if self.proven else ():
            self._evidence.observe(row)
            if rates[0].all():
                self._levels.observe(self._evidence.window, _models(rates))
            self._judged = []

    def allocate(self, problem: Problem) -> Allocation:
        present = next((sizes for sizes in self._sizes if _satisfies(sizes, problem)), None)
        if present is not None and problem.global_batch_size in self._judged:
            return Allocation(sizes=present)
        sizes = self._decide(problem, present)
        self._judged = [*self._judged, problem.global_batch_size][-_REMEMBERED:]
        sizes.flags.writeable = False  # They are given out as they are, again and again.
        others = [past for past in self._sizes if past is not present and past.sum() != sizes.sum()]
        self._sizes = [sizes, *others][:_REMEMBERED]
        return Allocation(sizes=sizes)

    def _decide(self, problem: Problem, present: IntArray | None) -> IntArray:
        if self._rates is None or self._rates.shape[1] != problem.workers or not self._rates[0].all():
            return equal_sizes(problem)
        bounds, times = Bounds.of_problem(problem), _models(self._rates)
        if present is None:
            return _plan(times, bounds)
        makespan = int(times.nanoseconds(present).max())
        gain_ppm = max(round(self.min_gain * _PPM), _ERRORS_TO_MOVE * int(self._rates[3].max()))
        if reachable(times, bounds, makespan * max(_PPM - gain_ppm, 0) // _PPM):
            sizes = _plan(times, bounds)
            # Rounded to whole samples, proportional sizes may miss the gain that the solver could reach.
            shorter = int(times.nanoseconds(sizes).max())
            if shorter < makespan and not self.proven:
                return sizes
            if shorter < makespan and self._evidence.proves(times, present, sizes):
                sizes = _simplest(times, bounds, shorter, sizes)
                if self._gains(present, sizes):
                    return sizes
        for models in (self._levels.times, times) if self.proven else ():
            simpler = None if models is None else self._simpler(models, problem, present)
            if simpler is not None:
                return simpler
        return present

    def _gains(self, present: IntArray, sizes: IntArray) -> bool:
        """Whether the levels, too, give these sizes a shorter time than the present ones."""
        times = self._levels.times
        if times is None:
            return True
        now, then = (int(times.nanoseconds(each).max()) for each in (present, sizes))
        return then < now

    def _simpler(self, times: Lines, problem: Problem, present: IntArray) -> IntArray | None:
        """More equal sizes that take no longer by these models and in the latest iterations, if they differ enough."""
        if np.ptp(present) <= problem.multiple:
            return None
        makespan = int(times.nanoseconds(present).max())
        share = problem.global_batch_size // problem.workers
        room = np.minimum(times.largest(makespan), present.max()) - present
        if not (room * _APART > share).any():  # Much cheaper than to look for simpler sizes.
            return None
        simpler = _simplest(times, Bounds.of_problem(problem), makespan, present)
        apart = np.abs(simpler - present).max() * _APART > share
        return simpler if apart and self._evidence.allows(times, present, simpler) else None


@final
@dataclass(frozen=True, kw_only=True)
class Predicted(Load):
    """LB-BSP: sizes in step with predicted speed.

    Attributes:
        predictor: A name of `PREDICTORS`.
        times: Whether a worker's time is `proportional` to its size, or `affine`: with a fixed part and a flat start.
        warmup: How many iterations of a worker are not counted at first.
        min_gain: Sizes move only for a larger predicted gain than this (0.015: 1.5 %). With the predictor `change`, the
            latest iterations must also show the gain, unless this is 0.
    """

    predictor: str = "change"
    times: Literal["affine", "proportional"] = "affine"
    warmup: int = 2
    min_gain: float = 0.015

    def __post_init__(self) -> None:
        Load.__post_init__(self)
        if self.predictor not in PREDICTORS:
            raise ConfigError(f"there is no predictor {self.predictor!r}: use one of {', '.join(sorted(PREDICTORS))}")
        if self.times not in ("affine", "proportional"):
            raise ConfigError(f"there is no time model {self.times!r}: use affine or proportional")
        if self.warmup < 0:
            raise ConfigError(f"a warm-up of {self.warmup} iterations is not possible: use 0 or more")
        if not 0.0 <= self.min_gain < 1.0:
            raise ConfigError(f"sizes cannot wait for a gain of {self.min_gain}: use 0 <= min_gain < 1")

    def policy(self, workers: int) -> LoadPolicy:
        return PredictedPolicy(min_gain=self.min_gain, proven=self._proven)

    def estimator(self) -> Estimator:
        shape = Shape() if self.times == "affine" else None
        block = BLOCK_MICROSECONDS / 1e6 if self._proven else 0.0
        return Estimator(PREDICTORS[self.predictor], shape=shape, warmup=self.warmup, block_seconds=block)

    @property
    def _proven(self) -> bool:
        return self.predictor == "change" and self.min_gain > 0.0


def _models(rates: IntArray) -> Lines:
    per_sample, fixed, flat, _ = rates
    return Lines(per_sample=per_sample, fixed=fixed, flat=flat)


def _plan(times: Lines, bounds: Bounds) -> IntArray:
    """The paper's sizes, without regard to the present ones."""
    return share_out(bounds, _SPEED_UNIT // times.per_sample) if times.proportional else solve(times, bounds)


def _simplest(times: Lines, bounds: Bounds, nanoseconds: int, sizes: IntArray) -> IntArray:
    """The most equal sizes that take no longer than these, which take `nanoseconds`; these if they hardly differ.

    A worker that is not the slowest at these sizes has a size by its estimate without need. Errors of the estimates
    would keep such workers apart that are equally fast.
    """
    within = np.clip(times.largest(nanoseconds) // bounds.multiple, bounds.lower, bounds.upper)
    level = share_out(replace(bounds, upper=within), np.ones_like(within))
    return level if np.abs(level - sizes).max() > bounds.multiple else sizes


def _satisfies(sizes: IntArray, problem: Problem) -> bool:
    """Whether sizes decided earlier still satisfy the problem."""
    return (
        len(sizes) == problem.workers
        and int(sizes.sum()) == problem.global_batch_size
        and bool(((problem.minimum <= sizes) & (sizes <= problem.maximum)).all())
        and (problem.multiple == 1 or not (sizes % problem.multiple).any())
    )
