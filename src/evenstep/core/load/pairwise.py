"""Moves samples from the slowest worker to the fastest until nothing is gained: LB-BSP's tuner for GPU clusters."""

from dataclasses import asdict, dataclass, replace
from typing import Final, cast, final

import numpy as np

from evenstep.core.errors import ConfigError
from evenstep.core.load.allocate.shares import shares
from evenstep.core.load.base import LoadPolicy
from evenstep.core.load.equal import equal_sizes
from evenstep.core.load.estimate import Estimator
from evenstep.core.load.move import Move, find_move
from evenstep.core.load.predict import PREDICTORS
from evenstep.core.load.time_window import TimeWindow
from evenstep.core.load.tuning import Tuning
from evenstep.core.values import Allocation, IntArray, Problem, Reports, State

_STEPS_IN_A_SHARE: Final = 6
_LARGEST_WINDOW: Final = 4
_PATIENCE: Final = 8
_TIMES_TO_ADOPT: Final = 2


@final
class PairwisePolicy:
    """LB-BSP's leader/straggler tuner (SoCC'20, section 3.3.2): no profile and no model of time.

    Each worker's compute time is averaged over a window of D iterations. The leader is the fastest worker with enough
    free memory for one step, the straggler the slowest that has something to give. A step of samples moves from the
    straggler to the leader. Where that oscillates, the step is halved and the window doubled.

    The paper does not say how large the first step and window are; we move a sixth of an equal share, and D is 5. It
    does not say what oscillates among more than two workers, where a move is seldom undone exactly; we take it that a
    worker that gave a step would get one of the same size, or the reverse, which says that all times lie within what
    one step changes. Ours too, because the paper does not say when the tuner stops or starts again:

    * A move needs a difference of 2 % that is told from noise; else it is measured on, up to eight times D. When that
      does not help, when no move is possible or when a step of one multiple oscillates, the tuner rests. There, a last
      move that made the slowest worker slower is taken back. The window is at most four times D.
    * Step and window are restored where the difference exceeds what it had settled at, or all that this step has left,
      by 5 % of the mean time. Where the last move may have done that, as at the edge of a device's tile, it is taken
      back first and the step halved. A worker that goes the same way a fourth time at a halved step doubles it again.
    * No worker's size is more than halved or doubled at once.
    * The first `warmup` iterations, and the first one after each move, are left out of the window (a device library
      chooses its kernels anew for a new size), as is an iteration of other sizes than the present ones: on CUDA a
      report is one iteration late.

    Another global batch is shared out in proportion to the present sizes, and taken over when it stays. Everything is
    decided from the reported integers, in integers, so that all workers decide alike.
    """

    __slots__ = ("_first_step", "_first_window", "_left_out", "_others", "_reported", "_sizes", "_tuning", "_window")

    def __init__(self, *, window: int = 5, step: int | None = None, warmup: int = 2) -> None:
        self._first_window = window
        self._first_step = step
        self._left_out = warmup
        self._others = 0
        self._reported = False
        self._sizes: IntArray = np.zeros(0, dtype=np.int64)
        self._window = TimeWindow(0)
        self._tuning = Tuning(step=1, window=window, directions=[])

    def observe(self, reports: Reports) -> None:
        """Take in what all workers reported of one iteration; it counts where all report the present sizes."""
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
        """The sizes of the next iteration; ConfigError where the problem's limits admit none."""
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

    def state_dict(self) -> State:
        return {
            "left_out": self._left_out,
            "others": self._others,
            "reported": self._reported,
            "sizes": self._sizes.tolist(),
            "tuning": asdict(self._tuning),
            "window": self._window.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        """Go on where the given state was taken; with another number of workers, as if nothing were known."""
        self._left_out = cast("int", state["left_out"])
        self._others = cast("int", state["others"])
        self._reported = cast("bool", state["reported"])
        self._sizes = np.array(state["sizes"], dtype=np.int64)
        self._tuning = Tuning.from_state(cast("State", state["tuning"]))
        self._window = TimeWindow.from_state(cast("State", state["window"]))

    def _begin(self, sizes: IntArray, problem: Problem) -> None:
        """Tune from these sizes, as if never before."""
        self._change(sizes)
        self._tuning = self._restored(problem)

    def _change(self, sizes: IntArray) -> None:
        """Other sizes from now on, of which nothing is measured yet."""
        self._left_out = max(self._left_out, min(len(self._sizes), 1))
        self._sizes = sizes
        self._window = TimeWindow(len(sizes))

    def _restored(self, problem: Problem) -> Tuning:
        """The first step, in whole multiples, and the first window."""
        step = self._first_step or problem.global_batch_size // problem.workers // _STEPS_IN_A_SHARE
        step = max(step // problem.multiple, 1) * problem.multiple
        return Tuning(step=step, window=self._first_window, directions=[0] * problem.workers)

    def _look(self, problem: Problem) -> None:
        """Every few iterations: move samples, measure for longer, or rest."""
        window, tuning = self._window, self._tuning
        if not window.iterations or window.iterations % self._first_window:
            return
        move = find_move(window, self._sizes, problem, tuning.step)
        told = move is not None and window.tells_apart(move.giver, move.taker)
        if move is not None and told and tuning.has_grown(move):
            self._grown(move, problem)
        elif move is not None and told and tuning.wants(move) and not window.iterations % tuning.window:
            self._tune(move, problem)
        elif move is None or window.iterations >= _PATIENCE * self._first_window:
            self._rest(self._sizes, 0 if move is None else move.gap_ppm)

    def _grown(self, move: Move, problem: Problem) -> None:
        """The gap is larger than any that this step left: by the last move, which is taken back, or by the workers."""
        last = self._tuning.last
        if last is None or not move.meets(last):
            self._tuning = self._restored(problem)
            self._move(move, problem)
        elif move.samples <= problem.multiple:
            self._settle(move, problem)
        else:
            self._tuning.change_step(_half(move, problem), self._longer_window())
            self._tuning.last = None
            self._change(_fitted(last.taken_back(self._sizes), problem))

    def _tune(self, move: Move, problem: Problem) -> None:
        """Make the move, with another step where those before it say so."""
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
        """Make the move, as large as the step is by now."""
        tuning = self._tuning
        move = find_move(self._window, self._sizes, problem, tuning.step) or move
        tuning.directions[move.giver] -= 1
        tuning.directions[move.taker] += 1
        tuning.last = move
        self._change(move.made(self._sizes))

    def _settle(self, move: Move, problem: Problem) -> None:
        """One multiple to and fro gains nothing: rest on the better side of it."""
        last = self._tuning.last
        if last is not None and last.longest_nanoseconds < move.longest_nanoseconds:
            self._rest(_fitted(last.taken_back(self._sizes), problem), last.gap_ppm)
        else:
            self._rest(self._sizes, move.gap_ppm)

    def _rest(self, sizes: IntArray, gap_ppm: int) -> None:
        """Keep these sizes as long as the gap does not grow; what it had settled at only falls while resting."""
        tuning = self._tuning
        if tuning.rests and tuning.reference_ppm is not None:
            gap_ppm = min(gap_ppm, tuning.reference_ppm)
        self._tuning = replace(tuning, rests=True, reference_ppm=gap_ppm, last=None)
        if np.array_equal(sizes, self._sizes):
            self._window = TimeWindow(len(sizes))
        else:
            self._change(sizes)

    def _longer_window(self) -> int:
        return min(2 * self._tuning.window, _LARGEST_WINDOW * self._first_window)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Pairwise:
    """LB-BSP's pairwise tuner for GPU clusters: it needs no model of time, and tens of iterations.

    `window` is the number of iterations that a decision rests on; `step` how many samples move at first, None for a
    sixth of an equal share; the first `warmup` iterations are not counted.
    """

    minimum: int | None = None
    maximum: int | None = None
    multiple: int = 1
    window: int = 5
    step: int | None = None
    warmup: int = 2

    def __post_init__(self) -> None:
        if self.multiple < 1:
            raise ConfigError(f"sizes cannot be multiples of {self.multiple}: use a multiple of at least 1")
        if self.window < 2:
            raise ConfigError(f"a window of {self.window} iterations does not show noise: use 2 or more")
        if self.step is not None and self.step < 1:
            raise ConfigError(f"a step of {self.step} samples moves nothing: use 1 or more, or leave it out")
        if self.warmup < 0:
            raise ConfigError(f"a warm-up of {self.warmup} iterations is not possible: use 0 or more")

    def policy(self, workers: int) -> LoadPolicy:
        """A new policy for this many workers."""
        return PairwisePolicy(window=self.window, step=self.step, warmup=self.warmup)

    def estimator(self) -> Estimator:
        """A new estimator, whose speeds are only shown."""
        return Estimator(PREDICTORS["change"])


def _half(move: Move, problem: Problem) -> int:
    return max(move.samples // 2 // problem.multiple, 1) * problem.multiple


def _fitted(sizes: IntArray, problem: Problem) -> IntArray:
    """The sizes, or those that satisfy the problem and are closest to them in proportion."""
    within = (sizes >= problem.minimum) & (sizes <= problem.maximum) & (sizes % problem.multiple == 0)
    if within.all() and int(sizes.sum()) == problem.global_batch_size:
        return sizes
    return shares(
        problem.global_batch_size, sizes, lower=problem.minimum, upper=problem.maximum, multiple=problem.multiple
    )
