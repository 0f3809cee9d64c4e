"""One worker's side of the question *how much*: measures its compute, and follows the policy on what all tell.

It does not communicate: an engine takes its row to the others, and brings back everybody's.
"""

import math
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from typing import cast, final

import numpy as np

from evenstep.core.activity import Doing
from evenstep.core.load.base import LoadPolicy
from evenstep.core.load.estimate import Estimator
from evenstep.core.load.limits import SizeLimits
from evenstep.core.samples import Ledger, MicroBatch, Share
from evenstep.core.values import UNLIMITED, Basis, Factors, IntArray, Problem, Reports, State
from evenstep.telemetry import Recorder
from evenstep.worker.activity import Activity
from evenstep.worker.device_memory import LearntLimit
from evenstep.worker.factors import FactorSampler
from evenstep.worker.hold import Hold
from evenstep.worker.iteration import Iteration
from evenstep.worker.planned import PlannedShares
from evenstep.worker.stopwatch import Stopwatch
from evenstep.worker.summary import Summary
from evenstep.worker.worker import Worker


@final
class Balancer:
    """Keeps a worker's sizes, its clock and its estimate through the iterations of a training run.

    Attributes:
        iteration: The iteration in hand, or the last one; None before the first.
        problem: What the sizes must satisfy now.
        policy: What decides the sizes.
        estimator: What this worker knows of its own speed.
        hold: Emulated slowness; None where there is none.
        closed: Whether the run is over.
        skipped: Pushes to servers that held a NaN or an infinity and were left out.
        activity: What this worker's main thread does, for its pulse.
    """

    def __init__(
        self,
        *,
        workers: Worker,
        policy: LoadPolicy,
        estimator: Estimator,
        problem: Problem,
        limits: SizeLimits,
        stopwatch: Stopwatch,
        recorder: Recorder,
        clock: Callable[[], float],
        hold: Hold | None = None,
        factors: FactorSampler | None = None,
        memory: LearntLimit | None = None,
        activity: Activity | None = None,
        summary: Summary | None = None,
    ) -> None:
        self.workers = workers
        self.activity = Activity() if activity is None else activity
        self.policy = policy
        self.estimator = estimator
        self.problem = problem
        self.hold = hold
        self.iteration: Iteration | None = None
        self.closed = False
        self.skipped = 0
        self._sampler = factors
        self._memory = memory
        self._summary = summary
        self._limits = limits
        self._warned = False
        self._stopwatch = stopwatch
        self._recorder = recorder
        self._clock = clock
        self._several_measurements = False
        self._entered: float | None = None
        self._sizes: IntArray | None = None
        self._basis: Basis = "speed"
        self._number = 0
        # Why the latest iterations had their sizes, the newest last; a measurement may be one iteration late.
        self._bases: deque[Basis] = deque(maxlen=1 + stopwatch.lag)
        # The factors known before the latest iterations, the newest last; a measurement may be one iteration late.
        self._factors = deque([Factors()] * (2 + stopwatch.lag), maxlen=2 + stopwatch.lag)

    # Sizes.

    def next_sizes(self, epoch: int) -> IntArray:
        """Everybody's sizes for the next iteration, which is of this epoch; alike on every worker."""
        if self.problem.epoch != epoch:
            self.problem = replace(self.problem, epoch=epoch)
        allocation = self.policy.allocate(self.problem)
        self.follow(allocation.sizes, allocation.basis)
        return allocation.sizes

    def planned_sizes(self) -> IntArray:
        """Everybody's sizes as planned last."""
        return self.next_sizes(self.problem.epoch) if self._sizes is None else self._sizes

    def shares(self, ledger: Ledger, *, epoch: int, depth: int) -> PlannedShares:
        """This worker's part of every slice of the epoch, as the policy plans it."""
        return PlannedShares(
            ledger,
            lambda: self.next_sizes(epoch),
            worker=self.workers.rank,
            depth=depth,
            minimum=self.smallest_batch,
        )

    def follow(self, sizes: IntArray, basis: Basis = "speed") -> None:
        """Everybody's sizes from the next iteration on; on servers they are decided there."""
        if self._sizes is None or basis != self._basis or not np.array_equal(sizes, self._sizes):
            self._recorder.record(
                {"event": "plan", "iteration": self._number, "batch_sizes": sizes.tolist(), "basis": basis}
            )
            self._sizes, self._basis = sizes, basis

    @property
    def smallest_batch(self) -> int:
        """The fewest samples that a worker can compute on."""
        return int(self.problem.minimum[self.workers.rank])

    def set_global_batch_size(self, global_batch_size: int) -> None:
        """Share out another global batch from now on.

        Raises:
            ConfigError: It cannot be shared out among these workers.
        """
        problem = self._limits.stretched(replace(self.problem, global_batch_size=global_batch_size))
        self.policy.allocate(problem)
        self.problem = problem

    # An iteration.

    def enter_loader(self) -> None:
        """The script asks for the next batch: compute pauses."""
        self._stopwatch.pause()
        self.activity.mark(Doing.FETCHING, self._number)
        self._entered = self._clock()
        if self.iteration is not None and self.iteration.ended is None:
            self.iteration.ended = self._entered

    def begin(self, share: Share, piece: MicroBatch, epoch: int) -> Iteration:
        """A batch is handed out: the clock of its compute runs from here.

        It goes on with the iteration before where that one has not been synchronised.
        """
        now = self._clock()
        entered = now if self._entered is None else self._entered
        before = self.iteration
        goes_on = before is not None and before.paused is None
        if not goes_on:
            self._stopwatch.restart()
            if self.hold is not None:
                self.hold.begin_iteration()
            if self._memory is not None:
                self._memory.begin()
        if piece.first:
            self._number += 1
        self.activity.mark(Doing.COMPUTING, self._number - 1)
        self.iteration = Iteration(
            number=self._number - 1,
            epoch=epoch,
            share=share,
            piece=piece,
            batch_sizes=[len(piece.positions)],
            samples=piece.samples,
            passes=int(piece.first),
            entered=entered,
            input_seconds=now - entered,
            script_seconds=0.0 if before is None else before.script_seconds_after(),
            basis=self._basis,
        )
        if goes_on and before is not None:
            self.iteration.go_on_from(before)
        if self.hold is not None:
            if piece.first:
                self._tell_slowness(self.hold, now)
            self.hold.require_memory(len(piece.positions))
        self._stopwatch.run()
        return self.iteration

    def _tell_slowness(self, hold: Hold, now: float) -> None:
        slowness = hold.news.of(self._number - 1)
        if slowness is not None:
            self._recorder.record(
                {"event": "disturbance", "iteration": self._number - 1, "at": now, **asdict(slowness)}
            )

    def resume(self) -> None:
        """Run the clock of compute, where it is not running."""
        self._stopwatch.run()

    def compute_pauses(self) -> None:
        """Stop the clock of compute."""
        self._stopwatch.pause()

    @property
    def computing(self) -> bool:
        """Whether the clock of compute runs."""
        return self._stopwatch.running

    def discard(self) -> None:
        """Stop the clock of compute at its last pause: what came since was no compute."""
        self._stopwatch.drop()

    def compute_seconds(self) -> float:
        """Compute since the iteration began; the clock must have been stopped."""
        return self._stopwatch.read()

    def compute_ends(self) -> None:
        """This worker's gradient is complete: stop the clock, after holding it where slowness is emulated."""
        now = self.iteration
        if now is None:
            return
        self.compute_pauses()
        if self.hold is not None:
            elapsed = self._stopwatch.read()
            self.resume()
            self.hold.until_due(iteration=now.number, batch_sizes=now.batch_sizes, elapsed_seconds=elapsed)
            self.compute_pauses()
        self.activity.mark(Doing.WAITING, now.number)
        now.paused = self._clock()

    # What the main thread does, for its pulse.

    def waiting(self) -> AbstractContextManager[None]:
        """Meanwhile, this worker waits for the others' part in the iteration in hand."""
        return self.activity.waiting(-1 if self.iteration is None else self.iteration.number)

    def waiting_ends(self) -> None:
        """The gradient of the iteration in hand is everybody's; the script may do what it likes with it."""
        if self.iteration is not None:
            self.activity.mark(Doing.COMPUTING, self.iteration.number)

    def steps(self) -> None:
        """The optimizer steps on the iteration in hand."""
        if self.iteration is not None:
            self.activity.mark(Doing.STEPPED, self.iteration.number)

    def leave_loop(self) -> None:
        """The script has left its loop after the iteration in hand."""
        self.activity.mark(Doing.LEFT, self._number - 1)

    def synchronised(self) -> None:
        """What all workers have computed is here, or is on its way in the device's stream."""
        self._stopwatch.synchronised()

    # What was measured.

    def row(self, now: Iteration) -> list[int]:
        """Take in what was measured of this iteration, and what this worker tells the others of it."""
        lap = self._stopwatch.lap(sum(now.batch_sizes), now.passes)
        now.device_synchronised_seconds = self._stopwatch.synchronised_seconds()
        samples, microseconds = (0, 0) if lap is None else (round(lap.samples), round(lap.compute_seconds * 1e6))
        if not now.observed:
            self._sample(now)
        self._observe(now, samples, microseconds)
        estimate = self.estimator.estimate(self._factors[-1])
        return [
            samples,
            microseconds,
            estimate.nanoseconds_per_sample,
            estimate.fixed_nanoseconds,
            estimate.error_ppm,
            estimate.flat_size,
            UNLIMITED if self._memory is None else self._memory.largest_size(),
        ]

    def _sample(self, now: Iteration) -> None:
        """What drives the speed of the next iteration, and what this one took of the memory."""
        self._factors.append(Factors() if self._sampler is None else self._sampler.sample())
        self._bases.append(now.basis)
        if self._memory is not None:
            self._memory.observe(max(now.batch_sizes))

    def learn(self, reports: Reports, outside: IntArray) -> None:
        """The iteration is over, and this is what everybody told of it: the next sizes rest on it.

        `outside` is what everybody told of what is not compute: everybody's `Iteration.outside`, shape [workers, 2].
        """
        self.policy.observe(reports)
        if self._limits.report_all(reports.largest_size):
            self.problem = self._limits.stretched(self.problem)
            self._warn_of_too_little_room()
        if self.iteration is not None and self.iteration.paused is not None:
            ended = self._clock() if self._entered is None else self._entered
            self._recorder.record(self.iteration.event(reports, self.workers.rank, ended))
            if self._summary is not None:
                self._summary.take(self.iteration, reports, outside, ended)

    def _warn_of_too_little_room(self) -> None:
        """Together the workers always have the global batch, whatever their memory is known to hold."""
        room, batch = self._limits.room(range(self.workers.count)), self.problem.global_batch_size
        if room < batch and not self._warned and self.workers.rank == 0:
            self._warned = True
            warnings.warn(
                f"the workers' memory is known to hold {room} samples together, fewer than the global batch of {batch},"
                " so larger batches than that are tried: if a worker runs out of memory, lower the global batch size",
                stacklevel=2,
            )

    def record_served(self, done: Iteration, row: list[int], held_seconds: float, more: Mapping[str, object]) -> None:
        """This iteration is over: write it down, with what the servers told of its push."""
        self._recorder.record({**done.served_event(row, held_seconds), **more})

    def note(self, values: Mapping[str, float]) -> None:
        """The script has something to write down, in or after this iteration."""
        now = self.iteration
        self._recorder.record(
            {
                "event": "note",
                "iteration": -1 if now is None else now.number,
                "at": self._clock(),
                "samples": 1 if now is None else now.samples,
                # JSON has no number for what is none.
                "values": {name: value if math.isfinite(value) else None for name, value in values.items()},
            }
        )

    def record_checkpoint(self, name: str, *, restored: bool) -> None:
        """All workers have saved a checkpoint together, or go on from one; the first of them writes it down."""
        if self.workers.rank == 0:
            now = self.iteration
            number = -1 if now is None else now.number
            self._recorder.record(
                {"event": "checkpoint", "iteration": number, "at": self._clock(), "name": name, "restored": restored}
            )

    def _observe(self, now: Iteration, samples: int, microseconds: int) -> None:
        """Feed the estimator, with what is reported and no more digits, so that a replay of the reports decides alike.

        Where an iteration has several synchronised backwards (two models, say), each measurement contains those before
        it and replaces them.
        """
        if now.observed and now.estimator_before is None:
            self._several_measurements = True  # Known from the next iteration on; this one keeps its first.
            return
        if now.estimator_before is not None:
            self.estimator.load_state_dict(now.estimator_before)
        elif self._several_measurements:
            now.estimator_before = self.estimator.state_dict()
        now.observed = True
        now.factors = self._factors[0]
        if self._bases[0] != "comparison":
            self.estimator.observe(samples, microseconds / 1e6, self._factors[0])

    # A run.

    @property
    def largest_run(self) -> int:
        """The largest batch that this worker has computed on, where its memory is watched; else 0."""
        return 0 if self._memory is None else self._memory.largest_run

    @property
    def overruns(self) -> int:
        """Iterations whose real work took longer than the emulated time."""
        return 0 if self.hold is None else self.hold.overruns

    def state_dict(self) -> State:
        """What the sizes are decided from; any one worker's serves them all, its own estimator's memory only itself."""
        return {
            "workers": self.workers.count,
            "worker": self.workers.rank,
            "epoch": self.problem.epoch,
            "maximum": self._limits.state_dict()["largest"],
            "policy": self.policy.state_dict(),
            "estimator": self.estimator.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        """Go on from a checkpoint; with another number of workers the speeds are learnt anew."""
        if state["workers"] != self.workers.count:
            return
        # Before anything is measured again, the sizes rest on the speeds and the memory that were known.
        self._limits.load_state_dict({"largest": state["maximum"]})
        self.problem = self._limits.stretched(replace(self.problem, epoch=cast("int", state["epoch"])))
        self.policy.load_state_dict(cast("State", state["policy"]))
        if state["worker"] == self.workers.rank:
            self.estimator.load_state_dict(cast("State", state["estimator"]))

    def close(self) -> None:
        """End the recording."""
        self.closed = True
        self._recorder.close()
