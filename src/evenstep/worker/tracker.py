"""One worker's side of the question *how much*: follows its iterations, and plans the next sizes from all reports.

It does not communicate. An engine sends this worker's row to the others and brings back the rows of all workers.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, cast, final

import numpy as np

from evenstep.core.activity import Doing
from evenstep.core.load.base import LoadPolicy
from evenstep.core.load.limits import SizeLimits
from evenstep.core.samples import CostSharing, EpochCosts, Ledger, Lookahead, PrivateParts, SampleTimes
from evenstep.core.samples.share import Share
from evenstep.core.values import Basis, IntArray, Problem, Reports, State
from evenstep.telemetry import Recorder, Silent
from evenstep.telemetry.events import CheckpointDone, Disturbed, Noted, Planned
from evenstep.worker.activity import Activity
from evenstep.worker.hold import Hold
from evenstep.worker.iteration import Iteration
from evenstep.worker.meter import Meter
from evenstep.worker.summary import Summary
from evenstep.worker.worker import Worker

if TYPE_CHECKING:
    from evenstep.protocol.messages import Grant


@final
@dataclass(kw_only=True, eq=False)
class Tracker:
    """Follows a worker's iterations through a training run and plans the batch sizes of all workers.

    Attributes:
        problem: The current conditions on the sizes.
        stopwatch: The meter's, which runs while this worker computes.
        hold: Emulates slowness; None for a real device.
        activity: The activity of the main thread, for this worker's pulse.
        follows_speed: Whether sizes depend on the reports, so that they are decided anew after each.
        lags: By how many iterations each worker's measurements come late; None if shares are not computed whole.
        tells_plans: Whether this worker is the one that records everybody's sizes.
        summary: Sums up the run on worker 0; None on other workers.
        place: This worker's number in messages where workers come and go; None: its rank.
        iteration: The current iteration, or the last one; None before the first.
        latest: The reports of all workers on the last iteration; None before the first.
        closed: Whether the run is over.
        skipped: How often this worker was left out because its gradient or model held a NaN or an infinity.
    """

    workers: Worker
    policy: LoadPolicy
    problem: Problem
    limits: SizeLimits
    meter: Meter
    recorder: Recorder
    clock: Callable[[], float]
    hold: Hold | None = None
    activity: Activity = field(default_factory=Activity)
    follows_speed: bool = True
    lags: Sequence[int] | None = None
    tells_plans: bool = True
    summary: Summary | None = None
    place: int | None = None
    iteration: Iteration | None = field(init=False, default=None)
    closed: bool = field(init=False, default=False)
    latest: Reports | None = field(init=False, default=None)
    skipped: int = field(init=False, default=0)
    _before: Iteration | None = field(init=False, default=None)
    _entered: float | None = field(init=False, default=None)
    _sizes: IntArray | None = field(init=False, default=None)
    _planned_for: Problem | None = field(init=False, default=None)
    _basis: Basis = field(init=False, default="speed")
    _weights: IntArray | None = field(init=False, default=None)
    _number: int = field(init=False, default=0)
    _warned: bool = field(init=False, default=False)
    _sample_times: SampleTimes | None = field(init=False, default=None)
    _began_at: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.stopwatch = self.meter.stopwatch
        self._keeps = not isinstance(self.recorder, Silent)

    def planned_sizes(self) -> IntArray:
        """The sizes of all workers as last planned, in samples, shape [workers]."""
        if self._sizes is None:
            return self._next_sizes(self.problem.epoch, self.problem.global_batch_size)
        return self._sizes

    def regroup(self, workers: Worker, policy: LoadPolicy, problem: Problem, limits: SizeLimits, number: int) -> None:
        """From now on these are the workers, and the next iteration has this number."""
        self.workers, self.policy, self.problem, self.limits = workers, policy, problem, limits
        self._planned_for, self._number = None, number

    def shares(
        self,
        ledger: Ledger,
        *,
        epoch: int,
        depth: int,
        costs: EpochCosts | None = None,
        asked: Mapping[int, tuple[int, ...]] | None = None,
        lengths: Sequence[int] | None = None,
    ) -> Lookahead:
        """Return this worker's part of each slice of the epoch, as the policy plans; by `costs` if samples differ.

        `asked` as in `Lookahead`. `lengths`: each worker has so many samples of its own, and the policy plans nothing.
        """
        sizes, private = self.sizes_in(epoch, ledger.global_batch_size), None
        if lengths is not None:
            self.problem = replace(self.problem, epoch=epoch)
            self.follow(np.array([-(-length // ledger.iterations) for length in lengths]))
            sizes, private = self.planned_sizes, PrivateParts(lengths, ledger.iterations)
        return Lookahead(
            ledger,
            worker=self.workers.rank,
            sizes=sizes,
            depth=depth,
            minimum=self.smallest_batch,
            sharing=None if costs is None else self._sharing(costs),
            private=private,
            asked=asked,
        )

    def sizes_in(self, epoch: int, global_batch_size: int) -> Callable[[], IntArray]:
        """Return what plans the sizes of the next iteration of this epoch, alike on every worker."""
        return partial(self._next_sizes, epoch, global_batch_size)

    def _sharing(self, costs: EpochCosts) -> CostSharing:
        self._sample_times = self._sample_times or SampleTimes()
        return CostSharing(
            costs=costs,
            minimum=self.smallest_batch,
            maximum=lambda: self.problem.maximum,
            most=self.limits.most,
            weights=lambda: self._weights,
            per_sample=self._sample_times.of(costs.costs),
        )

    def _next_sizes(self, epoch: int, global_batch_size: int) -> IntArray:
        """Plan the sizes of the next iteration; every worker computes the same."""
        if self.problem.global_batch_size != global_batch_size:
            # The loop is over another loader than the last one.
            self.problem = self.limits.stretched(replace(self.problem, global_batch_size=global_batch_size))
        if self.problem.epoch != epoch:
            self.problem = replace(self.problem, epoch=epoch)
        if self._planned_for is not self.problem or self._sizes is None:
            allocation = self.policy.allocate(self.problem)
            if allocation.sizes is not self._sizes or allocation.basis != self._basis:
                self.follow(allocation.sizes, allocation.basis)
            self._weights, self._planned_for = allocation.weights, self.problem
        assert self._sizes is not None
        return self._sizes

    def follow(self, sizes: IntArray, basis: Basis = "speed") -> None:
        """Use these sizes from the next iteration on; called from outside if servers decide them."""
        if self._sizes is None or basis != self._basis or sizes.tolist() != self._sizes.tolist():
            if self.tells_plans and self._keeps:
                self.recorder.record(
                    Planned(worker=self.workers.rank, iteration=self._number, batch_sizes=sizes.tolist(), basis=basis)
                )
            self._sizes, self._basis = sizes, basis

    @property
    def smallest_batch(self) -> int:
        """The smallest batch of this worker, in samples."""
        return int(self.problem.minimum[self.workers.rank])

    def set_global_batch_size(self, global_batch_size: int) -> None:
        """Use another global batch size from now on.

        Raises:
            ConfigError: These workers cannot share it.
        """
        problem = self.limits.stretched(replace(self.problem, global_batch_size=global_batch_size))
        self.policy.allocate(problem)
        self.problem = problem

    def enter_loader(self, *, ended: bool = True) -> None:
        """Called when the script asks for the next batch: compute pauses, or has `ended`."""
        if self.stopwatch.running:
            self.stopwatch.pause()
        self._entered, now = self.clock(), self.iteration
        self.activity.now = (Doing.FETCHING, self._number, self._entered)
        if ended and now is not None and now.ended is None:
            now.ended = self._entered

    def fetched_ahead(self, *, ended: bool) -> None:
        """Called when a batch for later is fetched: the current one goes on, unless it has `ended`."""
        if not ended:
            self._entered = None
            self.stopwatch.run()
        self.mark(Doing.COMPUTING)

    def begin(self, share: Share, piece: Share, epoch: int, loader: int = 0) -> Iteration:
        """Begin a batch that this loader hands out: its compute starts now.

        If the iteration before has not synchronised, the new one continues it.
        """
        now = self.clock()
        entered = now if self._entered is None else self._entered
        before = self._before = self.iteration
        continues = before is not None and before.paused is None
        if not continues and self.meter.memory is not None:
            self.meter.memory.begin()
        if not continues and self.hold is not None:
            self.hold.begin_iteration()
        if piece.first:
            self._number += 1
        self.activity.now = (Doing.COMPUTING, self._number - 1, now)
        script_seconds = 0.0
        if before is not None and before.paused is not None and before.ended is not None:
            script_seconds = max(before.ended - before.paused - before.synchronised_seconds, 0.0)
        size, cost = len(piece.positions), piece.cost
        self.iteration = Iteration(
            number=self._number - 1,
            epoch=epoch,
            loader=loader,
            share=share,
            piece=piece,
            batch_sizes=[size],
            costs=None if cost is None else [cost],
            padding=piece.padding,
            samples=piece.samples,
            load=size if cost is None or share.loads is None else share.loads.per_sample.load(cost, size),
            passes=int(piece.first),
            entered=entered,
            input_seconds=now - entered,
            script_seconds=script_seconds,
            basis=self._basis,
        )
        if continues and before is not None:
            self.iteration.continue_from(before)
        if self.hold is not None:
            slowness = self.hold.news.of(self._number - 1) if piece.first else None
            if slowness is not None and self._keeps:
                self.recorder.record(
                    Disturbed(
                        worker=self.workers.rank,
                        iteration=self._number - 1,
                        at=now,
                        factor=slowness.factor,
                        extra_seconds=slowness.extra_seconds,
                    )
                )
            batch_size = math.ceil(self.iteration.amounts[-1])
            self.hold.require_memory(batch_size, by_cost=self.iteration.costs is not None)
        if continues:
            self.stopwatch.run()
        else:
            self.stopwatch.restart()
        return self.iteration

    def take_back(self) -> None:
        """Take back the batch that began last, which is not computed: the iteration before it goes on."""
        if self.iteration is not None and self.iteration.piece.first:
            self._number -= 1
        self.iteration = self._before

    def compute_ends(self) -> None:
        """Stop the stopwatch at a complete gradient, after an emulated device has held the worker."""
        now = self.iteration
        if now is None:
            return
        self.stopwatch.pause()
        if self.hold is not None:
            self._hold(lambda hold, elapsed: hold.until_due(now.number, now.amounts, elapsed))
        now.paused = self.clock()
        self.activity.now = (Doing.WAITING, now.number, now.paused)

    def compute_pauses(self) -> None:
        """Stop the stopwatch while workers wait for each other in an iteration, after a slow device held this one."""
        ran = self.stopwatch.running
        self.stopwatch.pause()
        if ran:
            self._hold(Hold.so_far)

    def batch_begins(self) -> None:
        """Note, before `begin`, that a batch follows after which the worker is held, though its iteration may go on."""
        before, self._began_at = self.iteration, 0.0
        if self.hold is not None:
            if before is not None and before.paused is None:
                self._began_at = self.stopwatch.read()
            self.hold.begin_iteration()

    def batch_ends(self) -> None:
        """End a batch that began with `batch_begins`: the worker is held for this batch alone."""
        self.stopwatch.pause()
        if (now := self.iteration) is not None:
            last = now.batch_sizes[-1:]
            self._hold(lambda hold, elapsed: hold.until_due(now.number, last, elapsed - self._began_at))

    def _hold(self, until_due: Callable[[Hold, float], None]) -> None:
        """Hold the worker, if slowness is emulated, by what the paused stopwatch reads; it counts the hold too."""
        if self.hold is not None:
            elapsed = self.stopwatch.read()
            self.stopwatch.run()
            until_due(self.hold, elapsed)
            self.stopwatch.pause()

    def waiting(self) -> AbstractContextManager[None]:
        """While this is open, the worker waits for the others in the current iteration."""
        return self.activity.waiting(-1 if self.iteration is None else self.iteration.number)

    def hearing(self) -> AbstractContextManager[None]:
        """While this is open, the worker waits for what the others have read, before it computes any more."""
        now = self.iteration
        begun = now is not None and now.paused is None
        return self.activity.doing(Doing.HEARING, self._number - begun)

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """While this is open, the script waits for the other workers, in an iteration or not: this is not compute."""
        ran = self.stopwatch.running
        self.stopwatch.pause()  # An emulated device is held at the end of the iteration, for all of its compute.
        began = self.clock()
        yield
        if self._entered is not None:  # Waiting for a slower evaluation before an epoch is not waiting for input.
            self._entered += self.clock() - began
        if ran:
            self.stopwatch.run()

    def mark(self, doing: Doing) -> None:
        """Note that the main thread does this from now on, in or after the current iteration, if there is one."""
        if self.iteration is not None:
            self.activity.now = (doing, self.iteration.number, self.clock())

    def leave_loop(self) -> None:
        """Called when the script has left its loop after the current iteration."""
        self.activity.left = self._number - 1
        self.activity.mark(Doing.LEFT, self._number - 1)

    def learn(self) -> None:
        """Plan the next sizes from the reports that were received since the last call, if any."""
        if self.meter.received is None:
            return
        (reports, outside), self.meter.received = self.meter.received, None
        self.latest = reports
        if self.follows_speed:
            self.policy.observe(reports)
            self._planned_for = None
        now = self.iteration
        if now is not None and self.lags is not None and self._sample_times is not None:
            self._sample_times.observe(now.share if now.passes == 1 else None, now.share.loads, self.lags, reports)
        if reports.largest_size.tolist() != self.limits.latest and self.limits.report_all(reports.largest_size):
            self.problem = self.limits.stretched(self.problem)
            room, batch = self.limits.room(range(self.workers.count)), self.problem.global_batch_size
            if room < batch and not self._warned and self.workers.rank == 0:
                self._warned = True  # Without servers, the workers compute the global batch whatever they hold.
                warnings.warn(
                    f"the workers' memory is known to hold {room} samples together, fewer than the global batch of"
                    f" {batch}, so larger batches than that are tried: if a worker runs out of memory, lower the global"
                    " batch size",
                    stacklevel=2,
                )
        if now is not None and now.paused is not None:
            if self._keeps:
                ended = self.clock() if self._entered is None else self._entered
                self.recorder.record(now.event(reports, self.workers.rank, ended))
            if self.summary is not None:
                self.summary.take(now, reports, outside)

    def record_served(self, done: Iteration, row: list[int], told: "Grant") -> None:
        """Record a finished iteration, with what the servers reported of its push."""
        if self._keeps:
            self.recorder.record(done.served_event(self.workers.rank, row, told))

    def note(self, values: Mapping[str, float]) -> None:
        """Record values that the script gave in or after the current iteration."""
        now = self.iteration
        if self._keeps:
            self.recorder.record(
                Noted(
                    worker=self.workers.rank,
                    iteration=-1 if now is None else now.number,
                    at=self.clock(),
                    samples=1 if now is None else now.samples,
                    # JSON has no NaN and no infinity.
                    values={name: value if math.isfinite(value) else None for name, value in values.items()},
                )
            )

    def record_checkpoint(self, name: str, *, restored: bool) -> None:
        """Record, on worker 0, that all workers have saved or restored a checkpoint."""
        if self.workers.rank == 0:
            number = -1 if self.iteration is None else self.iteration.number
            self.recorder.record(
                CheckpointDone(worker=0, iteration=number, at=self.clock(), name=name, restored=restored)
            )

    def state_dict(self) -> State:
        """Return the basis of the sizes. One worker's state serves all, except for its forecaster's."""
        return {
            "workers": self.workers.count,
            "worker": self.workers.rank,
            "epoch": self.problem.epoch,
            "maximum": self.limits.state_dict()["largest"],
            "policy": self.policy.state_dict(),
            "forecaster": self.meter.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        """Continue from a checkpoint; with another number of workers, speeds are learned again."""
        if state["workers"] != self.workers.count:
            return
        # Until new measurements arrive, the sizes rest on the saved speeds and limits.
        self.limits.load_state_dict({"largest": state["maximum"]})
        self.problem = self.limits.stretched(replace(self.problem, epoch=cast("int", state["epoch"])))
        self.policy.load_state_dict(cast("State", state["policy"]))
        self._planned_for = None
        if state["worker"] == self.workers.rank:
            self.meter.load_state_dict(cast("State", state["forecaster"]))

    def close(self) -> None:
        """End the recording."""
        self.closed = True
        self.recorder.close()
