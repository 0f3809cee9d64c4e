"""The collective engine: barrier schemes on DistributedDataParallel.

One communication hook does two things: it weighs each worker's gradient by its share, and it is the stopwatch. Every
worker runs only its own predictor; the workers exchange integers and run the same allocation on them.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, cast, final

import numpy as np
import torch
import torch.distributed as dist

from evenstep.core.errors import ConfigError, DisagreementError, EvenstepError, WorkerLostError
from evenstep.core.load.base import LoadPolicy
from evenstep.core.load.estimate import Estimator
from evenstep.core.samples import Share
from evenstep.core.values import UNLIMITED, IntArray, Problem, Reports, State
from evenstep.runtime.c10d import GradBucket
from evenstep.runtime.direct_sum import DirectSum, suits
from evenstep.runtime.exchange import Exchange
from evenstep.runtime.hold import Hold
from evenstep.runtime.iteration import Iteration
from evenstep.runtime.liveness import Liveness
from evenstep.runtime.stopwatch import Stopwatch
from evenstep.runtime.weighting import GradientWeight
from evenstep.runtime.workers import Workers, minority, name_workers
from evenstep.telemetry import Recorder

CommHook: TypeAlias = tuple[Any, Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]]
"""A state and an averaging DDP communication hook, as `register_comm_hook` takes them."""


@final
class CollectiveEngine:
    """Keeps one worker in step with the others through the iterations of a training run.

    The loader calls `next_sizes` and `begin` around each hand-out, the model's wrapper calls `forward_begins`, DDP
    calls the hooks, and the optimizer calls `before_step`. Errors of collectives are kept until `before_step` or the
    next hand-out, because nothing typed passes through backward; no weight changes after one.
    """

    def __init__(
        self,
        *,
        workers: Workers,
        policy: LoadPolicy,
        estimator: Estimator,
        problem: Problem,
        models: Sequence[torch.nn.Module],
        stopwatch: Stopwatch,
        recorder: Recorder,
        clock: Callable[[], float],
        wait: Callable[[float], None],
        hold: Hold | None = None,
        liveness: Liveness | None = None,
    ) -> None:
        self.workers = workers
        self.problem = problem
        self.policy = policy
        self.estimator = estimator
        self.reports: Reports | None = None
        self.hold = hold
        self._maximum = problem.maximum
        self._several = len(models) > 1
        self._on_host = all(parameter.device.type == "cpu" for model in models for parameter in model.parameters())
        self._weights = [GradientWeight(model.parameters()) for model in models]
        self._stopwatch = stopwatch
        self._recorder = recorder
        self._clock = clock
        self._wait = wait
        self._liveness = liveness
        self._exchange = Exchange(workers, columns=1 + Reports.columns())
        self._iteration: Iteration | None = None
        self._failure: Exception | None = None
        self._counted: tuple[dist.Work | None, torch.Tensor, int] | None = None
        self._loader_entered: float | None = None
        self._sizes: IntArray | None = None
        self._number = 0

    # The loader's side.

    def enter_loader(self) -> None:
        """The script asks for the next batch: compute pauses, and the iteration before is over.

        Raises:
            WorkerLostError, DisagreementError: As `before_step`.
        """
        self._stopwatch.pause()
        self._loader_entered = self._clock()
        self._collect()
        if self.reports is not None:
            self.policy.observe(self.reports)
            self.problem = replace(self.problem, maximum=np.minimum(self._maximum, self.reports.largest_size))
            if self._iteration is not None and self._iteration.paused is not None:
                self._recorder.record(self._iteration.event(self.reports, self.workers.rank, self._loader_entered))
            self.reports = None

    def next_sizes(self) -> IntArray:
        """Everybody's sizes for the next iteration, alike on every worker."""
        sizes = self.policy.allocate(self.problem).sizes
        if self._sizes is None or not np.array_equal(sizes, self._sizes):
            self._recorder.record({"event": "plan", "iteration": self._number, "batch_sizes": sizes.tolist()})
            self._sizes = sizes
        return sizes

    def planned_sizes(self) -> IntArray:
        """Everybody's sizes as planned last."""
        return self.next_sizes() if self._sizes is None else self._sizes

    @property
    def smallest_batch(self) -> int:
        """The fewest samples that a worker can compute on."""
        return int(self.problem.minimum[self.workers.rank])

    def set_global_batch_size(self, global_batch_size: int) -> None:
        """Share out another global batch from now on.

        Raises:
            ConfigError: It cannot be shared out among these workers.
        """
        problem = replace(self.problem, global_batch_size=global_batch_size)
        self.policy.allocate(problem)
        self.problem = problem

    def state_dict(self) -> State:
        """What the sizes are decided from; any one worker's serves them all, its own estimator's memory only itself."""
        return {
            "workers": self.workers.count,
            "worker": self.workers.rank,
            "policy": self.policy.state_dict(),
            "estimator": self.estimator.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        """Go on from a checkpoint; with another number of workers the speeds are learnt anew."""
        if state["workers"] != self.workers.count:
            return
        self.policy.load_state_dict(cast("State", state["policy"]))
        if state["worker"] == self.workers.rank:
            self.estimator.load_state_dict(cast("State", state["estimator"]))

    @property
    def overruns(self) -> int:
        """Iterations whose real work took longer than the emulated time."""
        return 0 if self.hold is None else self.hold.overruns

    def close(self) -> None:
        """End the pulse and the recording, and leave this engine's process groups."""
        self._recorder.close()
        if self._liveness is not None:
            self._liveness.close()
        groups = {id(group): group for group in (self.workers.host_group, self.workers.device_group)}
        for group in groups.values():
            if group is not None:
                dist.destroy_process_group(group)

    def begin(self, share: Share, epoch: int) -> None:
        """A batch is handed out: the clock of its compute runs from here."""
        now = self._clock()
        before = self._iteration
        synchronised = before is None or before.paused is not None
        if synchronised:
            self._stopwatch.restart()
            if self.hold is not None:
                self.hold.begin_iteration()
        size = len(share.positions)
        if self.hold is not None:
            self.hold.require_memory(size)
        entered = now if self._loader_entered is None else self._loader_entered
        self._iteration = Iteration(
            number=self._number,
            epoch=epoch,
            share=share,
            batch_sizes=[size] if before is None or synchronised else [*before.batch_sizes, size],
            samples=share.samples + (0 if before is None or synchronised else before.samples),
            began=now,
            input_seconds=now - entered,
        )
        self._number += 1
        self._counted = None
        self._set_weight(share.weight)
        self._stopwatch.run()

    def weigh_by(self, count: int) -> None:
        """Weigh this worker's present batch by `count` over everybody's, instead of by samples."""
        if self._iteration is None:
            raise ConfigError("weigh_by was called before the loader handed out a batch: call it inside the loop")
        if count < 0 or count != int(count):
            raise ConfigError(f"weigh_by takes a whole number of units (tokens, pixels) >= 0, not {count!r}")
        count = int(count) if self._iteration.share.samples else 0
        total = torch.tensor([count], dtype=torch.int64)
        work = None
        if self.workers.host_group is not None:
            work = dist.all_reduce(total, group=self.workers.host_group, async_op=True)
        self._counted = (work, total, count)
        if self._iteration.batch_sizes[1:]:
            self._settle_weight()

    # The model's side.

    def forward_begins(self, model: int, *, synchronises: bool) -> None:
        """A forward pass of the model of that index, whose backward will, or will not, synchronise."""
        if self._iteration is None:
            return
        if not synchronises:
            self._weights[model].accumulate()
        self._stopwatch.run()

    def communicate(
        self, model: int, comm_hook: CommHook | None, bucket: GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        """The DDP communication hook: a bucket's gradient summed over all workers, weighted by share."""
        weight = self._weights[model]
        gradients = bucket.buffer()
        if self._failure is not None:
            return _completed(gradients)
        try:
            self._settle_weight()
            if self._iteration is None:
                weight.set(1 / self.workers.count)  # A backward outside the loop: what DDP does.
            if bucket.is_last():
                weight.synchronised()
                self._compute_ends()
            weight.apply(bucket, scale=1 if comm_hook is None else self.workers.count)
            if bucket.is_last() and self._on_host and comm_hook is None:
                return _completed(self._reduce_last(gradients))
            if comm_hook is None:
                work = dist.all_reduce(gradients, group=self.workers.device_group, async_op=True)
                reduced = work.get_future()
            else:
                state, hook = comm_hook
                reduced = hook(state, bucket)
            if bucket.is_last():
                self._tell()
        except (RuntimeError, EvenstepError) as error:
            self._fail(error)
            return _completed(gradients)
        weighted: torch.futures.Future[torch.Tensor] = reduced.then(lambda future: self._reduced(future, gradients))
        return weighted

    def _reduce_last(self, gradients: torch.Tensor) -> torch.Tensor:
        """Sum the bucket that everybody waits for; nothing is left to overlap with, so wait here."""
        if self._iteration is not None and suits(gradients, self.workers):
            direct = DirectSum(gradients, self.workers)
            self._exchange.deliver(direct.finish(self._row(self._iteration)))
            return gradients
        work = dist.all_reduce(gradients, group=self.workers.device_group, async_op=True)
        self._tell()  # After the gradients have left: they are what everybody waits for.
        work.wait()
        return gradients

    def _reduced(self, future: torch.futures.Future[Any], local: torch.Tensor) -> torch.Tensor:
        """The sum over all workers; after a failure, which is kept, the local gradients in its place."""
        try:
            return _tensor(future.value())
        except RuntimeError as error:
            self._fail(error)
            return local

    # The optimizer's side.

    def before_step(self) -> None:
        """Before any weight changes: everybody is here, and everybody did the same iteration with the same sizes.

        Raises:
            WorkerLostError: A worker died or stopped.
            DisagreementError: Workers disagree on the plan.
        """
        if self.workers.device_group is None and self._iteration is not None and self._iteration.paused is None:
            self._compute_ends()
            self._tell()
        self._collect()

    # In between.

    def _compute_ends(self) -> None:
        """This worker's gradient is complete: stop the clock, after holding it where slowness is emulated."""
        now = self._iteration
        if now is None:
            return
        self._stopwatch.pause()
        if self.hold is not None:
            elapsed = self._stopwatch.read()
            self._stopwatch.run()
            self.hold.until_due(iteration=now.number, batch_sizes=now.batch_sizes, elapsed_seconds=elapsed)
            self._stopwatch.pause()
        now.paused = self._clock()

    def _tell(self) -> None:
        """Start the exchange with the others."""
        if self._iteration is not None:
            self._exchange.start(self._row(self._iteration))

    def _row(self, now: Iteration) -> list[int]:
        """Take in what was measured, and what this worker tells the others of it."""
        lap = self._stopwatch.lap(sum(now.batch_sizes), len(now.batch_sizes))
        samples, microseconds = (0, 0) if lap is None else (round(lap.samples), round(lap.compute_seconds * 1e6))
        self._observe(now, samples, microseconds)
        estimate = self.estimator.estimate()
        return [
            now.fingerprint(weighed=self._counted is not None),
            samples,
            microseconds,
            estimate.nanoseconds_per_sample,
            estimate.fixed_nanoseconds,
            estimate.error_ppm,
            estimate.flat_size,
            UNLIMITED if self.hold is None else self.hold.largest_batch,
        ]

    def _observe(self, now: Iteration, samples: int, microseconds: int) -> None:
        """Feed the estimator, with what is reported and no more digits, so that a replay of the reports decides alike.

        Where an iteration has several synchronised backwards (two models, say), each measurement contains those before
        it and replaces them.
        """
        if now.observed and now.estimator_before is None:
            self._several = True  # Known from the next iteration on; this one keeps its first measurement.
            return
        if now.estimator_before is not None:
            self.estimator.load_state_dict(now.estimator_before)
        elif self._several:
            now.estimator_before = self.estimator.state_dict()
        now.observed = True
        self.estimator.observe(samples, microseconds / 1e6)

    def _settle_weight(self) -> None:
        """Wait for the units that the other workers counted, where this iteration is weighted by them."""
        if self._counted is None or self._iteration is None:
            return
        work, total, count = self._counted
        if work is None and self.workers.host_group is not None:
            return
        if work is not None:
            self._stopwatch.pause()
            work.wait()
            self._stopwatch.run()
        if not int(total):
            raise ConfigError("weigh_by counted 0 on every worker: skip such an iteration on all of them")
        self._counted = (None, total, count)
        self._set_weight(count / int(total))

    def _set_weight(self, share: float) -> None:
        for weight in self._weights:
            weight.set(share)

    def _collect(self) -> None:
        """Await the exchange and check that the workers agree; raise what has failed since."""
        try:
            table = self._exchange.finish()
        except RuntimeError as error:
            self._fail(error)
            table = None
        if self._failure is not None:
            raise self._explained(self._failure) from self._failure
        if table is None:
            return
        now = self._iteration
        if now is not None and now.paused is not None:
            now.synchronised_seconds = self._clock() - now.paused
        odd = minority([str(fingerprint) for fingerprint in table[:, 0].tolist()])
        if odd:
            raise DisagreementError(
                f"{name_workers(odd)} did not do the same iteration {now.number if now else '?'} as the others:"
                " every worker must take every batch of the loader and run backward on it (and call weigh_by alike)"
            )
        self.reports = Reports.from_table(table[:, 1:])

    def _fail(self, cause: Exception) -> None:
        """Keep the first failure; a communication thread may be the one that meets it."""
        if self._failure is None:
            self._failure = cause

    def _explained(self, cause: Exception) -> EvenstepError:
        if not isinstance(cause, EvenstepError):
            lost = self._liveness
            cause = WorkerLostError(f"a collective failed: {cause}") if lost is None else lost.lost(cause, self._wait)
            self._failure = cause
        return cause


def _tensor(value: Any) -> torch.Tensor:
    """What a reduction's future holds: c10d gives a list of one tensor, a user's hook a tensor."""
    return cast("torch.Tensor", value[0] if isinstance(value, list) else value)


def _completed(value: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(value)
    return future
