"""Moves samples from the slowest worker to the fastest until nothing is gained: LB-BSP's tuner for GPU clusters."""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Final, final

import numpy as np

from evenstep.core.errors import ConfigError
from evenstep.core.load.base import Load, LoadPolicy
from evenstep.core.load.equal import equal_sizes
from evenstep.core.load.move import Move, TimeWindow, find_move
from evenstep.core.load.shares import shares_of
from evenstep.core.values import Allocation, IntArray, Problem, Reports

_STEPS_IN_A_SHARE: Final = 6
_LARGEST_WINDOW: Final = 4
_PATIENCE: Final = 8
_TIMES_TO_ADOPT: Final = 2
_EVEN_PPM: Final = 20_000
_GROWN_PPM: Final = 50_000
_STEADY: Final = 3


@final
@dataclass(slots=True, kw_only=True)
class Tuning:
    """How the tuner proceeds.

    Attributes:
        step: The largest number of samples of a move.
        window: The smallest number of iterations that a move rests on.
        directions: For each worker, the steps it got minus those it gave, since the step last changed.
        last: The last move, if it can still be taken back.
        reference_ppm: The largest gap that is no sign of a change: at rest the one at which it settled, before that the
            largest since the step last changed; None before the first change of the step.
        rests: Whether only a change of speed can move samples.
    """

    step: int
    window: int
    directions: list[int]
    last: Move | None = None
    reference_ppm: int | None = None
    rests: bool = False

    def wants(self, move: Move) -> bool:
        """Whether the move is worth making although no speed has changed."""
        return not self.rests and move.gap_ppm > _EVEN_PPM

    def has_grown(self, move: Move) -> bool:
        """Whether a change of speed, or the last move, has made the gap larger."""
        return self.reference_ppm is not None and move.gap_ppm > self.reference_ppm + _GROWN_PPM

    def oscillates(self, move: Move) -> bool:
        """Whether a worker would go back the way it came at this step."""
        return self.directions[move.giver] > 0 or self.directions[move.taker] < 0

    def goes_on(self, move: Move) -> bool:
        """Whether a worker has gone this way so often that the step must be too small."""
        return -self.directions[move.giver] >= _STEADY or self.directions[move.taker] >= _STEADY

    def change_step(self, step: int, window: int) -> None:
        """Use another step and window; restart the count of directions."""
        self.step, self.window = step, window
        self.directions = [0] * len(self.directions)


@final
@dataclass(slots=True)
class PairwisePolicy(LoadPolicy):
    """LB-BSP's leader/straggler tuner (SoCC'20, section 3.3.2): no profile and no model of time.

    Each worker's compute time is averaged over a window of D iterations. The leader is the fastest worker with enough
    free memory for one step, the straggler the slowest that can give one. A step of samples moves from the straggler to
    the leader. If that oscillates, the step is halved and the window doubled.

    The paper does not give the first step and window; we move a sixth of an equal share, and D is 5. It does not define
    oscillation for more than two workers, where a move is seldom undone exactly. We take it that a worker that gave a
    step would get one of the same size, or the reverse: all times then lie within what one step changes. The paper does
    not say when the tuner stops or starts again either. Our rules:

    * A move needs a difference of 2 % that stands out from the noise; otherwise measuring continues, up to eight times
      D. If that does not help, if no move is possible, or if a step of one multiple oscillates, the tuner rests. It
      then takes back a last move that made the slowest worker slower. The window is at most four times D.
    * Step and window are restored if the difference exceeds the one at which the tuner settled, or all that this step
      has left, by 5 % of the mean time. If the last move may be the cause, as at the edge of a device's tile, it is
      taken back first and the step halved. A worker that moves in one direction a fourth time at a halved step doubles
      the step again.
    * No worker's size is more than halved or doubled at once.
    * The window leaves out the first `warmup` iterations and the first one after each move (a device library chooses
      its kernels again for a new size), and iterations of other sizes than the present ones: on CUDA, a report is one
      iteration late.

    Another global batch is shared out in proportion to the present sizes, and adopted if it stays. Everything is
    decided from the reported integers, in integers, so that all workers decide alike.
    """

    config: "Pairwise"
    _left_out: int = field(init=False)
    _others: int = field(init=False, default=0)
    _reported: bool = field(init=False, default=False)
    _sizes: IntArray = field(init=False, default_factory=lambda: np.zeros(0, dtype=np.int64))
    _window: TimeWindow = field(init=False, default_factory=lambda: TimeWindow(0))
    _tuning: Tuning = field(init=False, default_factory=lambda: Tuning(step=1, window=1, directions=[]))

    def __post_init__(self) -> None:
        self._left_out = self.config.warmup

    def observe(self, reports: Reports) -> None:
        """Take in one iteration; it counts if all workers report the present sizes."""
        self._reported = True
        if not np.array_equal(reports.samples, self._sizes):
            return
        if (reports.compute_microseconds[self._sizes > 0] <= 0).any():
            return
        if self._left_out:
            self._left_out -= 1
        else:
            self._window.add(reports.compute_microseconds)

    def allocate(self, problem: Problem) -> Allocation:
        if len(self._sizes) != problem.workers:
            self._begin(equal_sizes(problem), problem)
        elif int(self._sizes.sum()) != problem.global_batch_size:
            sizes = _fitted(self._sizes, problem)
            self._others += self._reported
            self._reported = False
            if self._others < _TIMES_TO_ADOPT:
                return Allocation(sizes=sizes)
            self._begin(sizes, problem)
        elif not np.array_equal(sizes := _fitted(self._sizes, problem), self._sizes):
            self._tuning.last = None
            self._change(sizes)
        self._others = 0
        self._reported = False
        self._look(problem)
        return Allocation(sizes=self._sizes.copy())

    def _begin(self, sizes: IntArray, problem: Problem) -> None:
        """Start tuning from these sizes."""
        self._change(sizes)
        self._tuning = self._restored(problem)

    def _change(self, sizes: IntArray) -> None:
        """Use other sizes from now on, and restart the window."""
        self._left_out = max(self._left_out, min(len(self._sizes), 1))
        self._sizes = sizes
        self._window = TimeWindow(len(sizes))

    def _restored(self, problem: Problem) -> Tuning:
        """The first step, in whole multiples, and the first window."""
        step = self.config.step or problem.global_batch_size // problem.workers // _STEPS_IN_A_SHARE
        step = max(step // problem.multiple, 1) * problem.multiple
        return Tuning(step=step, window=self.config.window, directions=[0] * problem.workers)

    def _look(self, problem: Problem) -> None:
        """Every few iterations: move samples, measure longer, or rest."""
        window, tuning = self._window, self._tuning
        if not window.iterations or window.iterations % self.config.window:
            return
        move = find_move(window, self._sizes, problem, tuning.step)
        told = move is not None and window.tells_apart(move.giver, move.taker)
        if move is not None and told and tuning.has_grown(move):
            self._grown(move, problem)
        elif move is not None and told and tuning.wants(move) and not window.iterations % tuning.window:
            self._tune(move, problem)
        elif move is None or window.iterations >= _PATIENCE * self.config.window:
            self._rest(self._sizes, 0 if move is None else move.gap_ppm)

    def _grown(self, move: Move, problem: Problem) -> None:
        """The gap has grown: take back the last move if it was the cause, else restore the first step."""
        last = self._tuning.last
        if last is None or not move.meets(last):
            self._tuning = self._restored(problem)
            self._move(move, problem)
        elif move.samples <= problem.multiple:
            self._settle(move, problem)
        else:
            self._tuning.change_step(_half(move, problem), self._longer_window())
            self._tuning.last = None
            self._change(_fitted(last.made(self._sizes, back=True), problem))

    def _tune(self, move: Move, problem: Problem) -> None:
        """Make the move, after changing the step if the moves before it call for that."""
        tuning, first = self._tuning, self._restored(problem)
        if tuning.oscillates(move):
            if move.samples <= problem.multiple:
                self._settle(move, problem)
                return
            tuning.change_step(_half(move, problem), self._longer_window())
            tuning.reference_ppm = move.gap_ppm
        elif tuning.goes_on(move) and tuning.step < first.step:
            tuning.change_step(min(2 * tuning.step, first.step), max(tuning.window // 2, first.window))
        if tuning.reference_ppm is not None:
            tuning.reference_ppm = max(move.gap_ppm, tuning.reference_ppm)
        self._move(move, problem)

    def _move(self, move: Move, problem: Problem) -> None:
        """Make the move, at the present step."""
        tuning = self._tuning
        move = find_move(self._window, self._sizes, problem, tuning.step) or move
        tuning.directions[move.giver] -= 1
        tuning.directions[move.taker] += 1
        tuning.last = move
        self._change(move.made(self._sizes))

    def _settle(self, move: Move, problem: Problem) -> None:
        """Moving one multiple back and forth gains nothing: rest at the better of both sizes."""
        last = self._tuning.last
        if last is not None and last.longest_nanoseconds < move.longest_nanoseconds:
            self._rest(_fitted(last.made(self._sizes, back=True), problem), last.gap_ppm)
        else:
            self._rest(self._sizes, move.gap_ppm)

    def _rest(self, sizes: IntArray, gap_ppm: int) -> None:
        """Keep these sizes while the gap does not grow; at rest, the gap at which it settled only falls."""
        tuning = self._tuning
        if tuning.rests and tuning.reference_ppm is not None:
            gap_ppm = min(gap_ppm, tuning.reference_ppm)
        self._tuning = replace(tuning, rests=True, reference_ppm=gap_ppm, last=None)
        if np.array_equal(sizes, self._sizes):
            self._window = TimeWindow(len(sizes))
        else:
            self._change(sizes)

    def _longer_window(self) -> int:
        return min(2 * self._tuning.window, _LARGEST_WINDOW * self.config.window)


@final
@dataclass(frozen=True, kw_only=True)
class Pairwise(Load):
    """LB-BSP's pairwise tuner for GPU clusters: it needs no model of time, and tens of iterations.

    Attributes:
        window: The number of iterations that a decision rests on.
        step: How many samples move at first; None for a sixth of an equal share.
        warmup: How many iterations are not counted at first.
    """

    uses_estimates: ClassVar[bool] = False

    window: int = 5
    step: int | None = None
    warmup: int = 2

    def __post_init__(self) -> None:
        Load.__post_init__(self)
        if self.window < 2:
            raise ConfigError(f"a window of {self.window} iterations does not show noise: use 2 or more")
        if self.step is not None and self.step < 1:
            raise ConfigError(f"a step of {self.step} samples moves nothing: use 1 or more, or leave it out")
        if self.warmup < 0:
            raise ConfigError(f"a warm-up of {self.warmup} iterations is not possible: use 0 or more")

    def policy(self, workers: int) -> LoadPolicy:
        return PairwisePolicy(self)


def _half(move: Move, problem: Problem) -> int:
    return max(move.samples // 2 // problem.multiple, 1) * problem.multiple


def _fitted(sizes: IntArray, problem: Problem) -> IntArray:
    """The sizes if they satisfy the problem, else those closest to them in proportion."""
    within = (sizes >= problem.minimum) & (sizes <= problem.maximum) & (sizes % problem.multiple == 0)
    if within.all() and int(sizes.sum()) == problem.global_batch_size:
        return sizes
    return shares_of(problem, sizes)
