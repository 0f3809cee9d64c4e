"""The collective engine: barrier schemes on DistributedDataParallel.

One communication hook does two things: it weighs each worker's gradient by its share, and it is the stopwatch. Every
worker runs only its own predictor; the workers exchange integers and run the same allocation on them.
"""

import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias, cast, final

import numpy as np
import torch
import torch.distributed as dist

from evenstep.core.disagreement import require_same_plan
from evenstep.core.errors import ConfigError, EvenstepError
from evenstep.core.samples import WEIGHTINGS, Ledger, MicroBatch, Share, Shares, by_samples
from evenstep.core.values import IntArray, Reports
from evenstep.launch.c10d import GradBucket
from evenstep.schemes import Scheme
from evenstep.torch.engines.direct_sum import DirectSum, suits
from evenstep.torch.engines.gradient_watch import GradientWatch
from evenstep.torch.engines.running_statistics import RunningStatistics
from evenstep.torch.engines.weighting import GradientWeight
from evenstep.torch.processes.exchange import Exchange
from evenstep.torch.processes.liveness import Liveness, explained
from evenstep.torch.processes.workers import Workers, gather
from evenstep.worker.balancer import Balancer
from evenstep.worker.iteration import Iteration, units_of

CommHook: TypeAlias = tuple[Any, Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]]
"""A state and an averaging DDP communication hook, as `register_comm_hook` takes them."""


@final
class CollectiveEngine:
    """An `Engine` that sums gradients in every iteration, behind a barrier."""

    def __init__(
        self,
        *,
        workers: Workers,
        balancer: Balancer,
        scheme: Scheme,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        wait: Callable[[float], None],
        clock: Callable[[], float],
        liveness: Liveness | None = None,
    ) -> None:
        self.balancer = balancer
        self.workers = workers
        self.reports: Reports | None = None
        self._outside: IntArray = np.zeros((self.workers.count, 2), dtype=np.int64)
        self._on_host = all(parameter.device.type == "cpu" for model in models for parameter in model.parameters())
        # Weakly, since their hooks hold this engine, and with it the data workers.
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._weights = [GradientWeight(model.parameters()) for model in models]
        together = self.workers.count > 1
        self._watches = [GradientWatch(model) for model in models] if together else []
        self._statistics = [RunningStatistics(model, self.workers) for model in models] if together else []
        self._weight_of = WEIGHTINGS[scheme.weighting]
        self._blocking = scheme.exchange == "blocking"
        self._accumulates = scheme.micro_batch is not None
        self._clock = clock
        self._wait = wait
        self._liveness = liveness
        self._exchange = Exchange(self.workers, columns=3 + Reports.columns())
        self._failure: Exception | None = None
        self._counted: tuple[dist.Work | None, torch.Tensor, int] | None = None
        self._to_tell = False
        self._plan: Callable[[], dict[str, Any]] = dict
        """Of the iteration that was told last."""
        self._left_loop_behind = False
        self._warned = False
        self._alone = self._accumulates and self.workers.count == 1
        if self._alone:
            for weight in self._weights:
                weight.apply_by_itself()

    # The loader's side.

    def enter_loader(self) -> None:
        self.balancer.enter_loader()
        self.balancer.synchronised()
        self._tell_now()
        self._collect()
        if self.reports is not None:
            self.balancer.learn(self.reports, self._outside)
            self.reports = None

    def shares(self, ledger: Ledger, *, epoch: int, depth: int) -> Shares:
        return self.balancer.shares(ledger, epoch=epoch, depth=depth)

    def leave_loop(self) -> None:
        self.balancer.leave_loop()

    def begin(self, share: Share, piece: MicroBatch, epoch: int) -> None:
        self.balancer.begin(share, piece, epoch)
        self._counted = None
        self._set_weight(self._weight_of(share) * piece.portion)

    def close(self) -> None:
        self.balancer.close()
        for watch in self._watches:
            watch.close()
        if self._liveness is not None:
            self._liveness.close()
        self.workers.leave()

    def weigh_by(self, count: int) -> None:
        now = self.balancer.iteration
        count = units_of(now, count)
        if self._accumulates:
            raise ConfigError(
                "weigh_by does not go with micro_batch, whose number differs from worker to worker: leave out one of"
                " them"
            )
        total = torch.tensor([count], dtype=torch.int64)
        work = None
        if self.workers.host_group is not None:
            work = dist.all_reduce(total, group=self.workers.host_group, async_op=True)
        self._counted = (work, total, count)
        if any(weight.accumulating for weight in self._weights):
            self._settle_weight()  # Before the gradient adds to others, weighted otherwise.

    # The model's side.

    @property
    def synchronises(self) -> bool:
        return self.balancer.iteration is None or self.balancer.iteration.piece.last

    @property
    def unsettled(self) -> str | None:
        return None

    def settle(self) -> None:
        """They are alike after every step."""

    def forward_begins(self, model: int, *, synchronises: bool) -> None:
        if self._watches:
            self._watches[model].forward(synchronises=synchronises)
            self._finish_statistics()  # A pass must not be undone by the average over those before it.
        if self.balancer.iteration is None:
            return
        if self._after_the_loop:
            self._weights[model].set(1 / self.workers.count)
            return
        if not synchronises and not self._alone:
            self._settle_weight()
            self._weights[model].accumulate()
        self.balancer.resume()

    def forward_ends(self, outputs: object) -> None:
        """No gradient is stale here, so a learning rate that goes well in one process does so too."""

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
            if self.balancer.iteration is None:
                weight.set(1 / self.workers.count)  # A backward outside the loop: what DDP does.
            if bucket.is_last():
                weight.synchronised()
                self._watches[model].reduced()
                self._compute_ends()
            weight.apply(bucket, scale=1 if comm_hook is None else self.workers.count)
            if bucket.is_last() and self._on_host and comm_hook is None:
                self._reduce_last(gradients)
                self._start_statistics(model)
                self.balancer.waiting_ends()
                return _completed(gradients)
            if comm_hook is None:
                work = dist.all_reduce(gradients, group=self.workers.device_group, async_op=True)
                reduced = work.get_future()
            else:
                state, hook = comm_hook
                reduced = hook(state, bucket)
            if bucket.is_last():
                self._tell()
                self._start_statistics(model)
        except (RuntimeError, EvenstepError) as error:
            self._fail(error)
            return _completed(gradients)
        last = bucket.is_last()
        weighted: torch.futures.Future[torch.Tensor] = reduced.then(
            lambda future: self._reduced(future, gradients, last=last)
        )
        return weighted

    def weigh(self, model: int, gradients: torch.Tensor) -> None:
        """Weigh gradients of a sharded model in place, before they are summed over all workers."""
        self._settle_weight()
        if self.balancer.iteration is None:
            self._weights[model].set(1 / self.workers.count)  # A backward outside the loop: what FSDP does.
        self._weights[model].apply_whole(gradients)

    def backward_ends(self, model: int) -> None:
        """A backward of a sharded model is over, its gradients are summed; its compute ended as it sent the last."""
        self._weights[model].synchronised()
        self._watches[model].reduced()
        self.balancer.discard()
        self._compute_ends()
        self._tell()
        self._start_statistics(model)
        self.balancer.waiting_ends()

    def _reduce_last(self, gradients: torch.Tensor) -> None:
        """Sum the bucket that everybody waits for; nothing is left to overlap with, so wait here."""
        now = self.balancer.iteration
        if now is not None and self._to_tell and not self._blocking and suits(gradients, self.workers):
            direct = DirectSum(gradients, self.workers)
            self._to_tell = False
            self._exchange.deliver(direct.finish(self._row(now)))
            return
        work = dist.all_reduce(gradients, group=self.workers.device_group, async_op=True)
        self._tell()  # After the gradients have left: they are what everybody waits for.
        work.wait()

    def _reduced(self, future: torch.futures.Future[Any], local: torch.Tensor, *, last: bool) -> torch.Tensor:
        """The sum over all workers; after a failure, which is kept, the local gradients in its place."""
        try:
            if last:
                self.balancer.waiting_ends()
            return _tensor(future.value())
        except RuntimeError as error:
            self._fail(error)
            return local

    # The optimizer's side.

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Before any weight changes: everybody is here, and everybody did the same iteration with the same sizes."""
        now = self.balancer.iteration
        if not self.synchronises:
            raise ConfigError(
                "the optimizer was stepped between two micro-batches of an iteration: step the one that prepare"
                " returned, which waits for the last of them"
            )
        if self.workers.device_group is None and now is not None and now.paused is None:
            self._compute_ends()
        self.balancer.synchronised()
        self._tell_now()
        self._collect()
        for watch in self._watches:
            trouble = watch.trouble(optimizer)
            if trouble is not None:
                raise ConfigError(trouble)
        self.balancer.steps()
        if self._left_loop_behind and not self._warned:
            self._warned = True
            warnings.warn(
                "the optimizer steps on a batch after the loop over the prepared loader has ended, where every worker's"
                " gradient counts alike: loop over the loader anew for each epoch (itertools.cycle hands out old"
                " batches, whose sizes are not known any more)",
                stacklevel=2,
            )

    # In between.

    @property
    def _after_the_loop(self) -> bool:
        """Whether a loop has ended, and what is computed on is none of its batches: what plain training does, then."""
        now = self.balancer.iteration
        return now is not None and now.ended is not None

    def _compute_ends(self) -> None:
        """This worker's gradient is complete; from here on it only communicates."""
        now = self.balancer.iteration
        if now is None:
            return
        if self._after_the_loop:
            self._left_loop_behind = True
            return
        if self._accumulates and now.paused is not None:
            raise ConfigError(
                "a second backward in an iteration does not go with micro_batch: add the losses up and run one backward"
            )
        self.balancer.compute_ends()
        self._to_tell = True

    def _tell(self) -> None:
        """Start the exchange with the others, while the gradients are on their way."""
        if not self._blocking:
            self._tell_now()

    def _tell_now(self) -> None:
        if self._to_tell and self.balancer.iteration is not None:
            self._to_tell = False
            self._exchange.start(self._row(self.balancer.iteration))

    def _row(self, now: Iteration) -> list[int]:
        optimizers = [optimizer for known in self._optimizers if (optimizer := known()) is not None]
        rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups if "lr" in group]
        # One that is a tensor may be on a device, which would have to be waited for.
        rates = [rate for rate in rates if not isinstance(rate, torch.Tensor)]
        weighed = self._counted is not None
        self._plan = partial(now.plan, weighed=weighed, rates=rates)
        return [now.fingerprint(weighed=weighed, rates=rates), *now.outside, *self.balancer.row(now)]

    def _settle_weight(self) -> None:
        """Wait for the units that the other workers counted, where this iteration is weighted by them."""
        if self._counted is None:
            return
        work, total, count = self._counted
        if work is None and self.workers.host_group is not None:
            return
        if work is not None:
            self.balancer.compute_pauses()
            try:
                with self.balancer.activity.waiting():
                    work.wait()
            except RuntimeError as error:
                raise self.explained(error) from error
            self.balancer.resume()
        self._counted = (None, total, count)
        # Where nothing counts anywhere there is nothing to learn, as with a loss that is divided by max(count, 1).
        self._set_weight(count / max(int(total), 1))

    def _set_weight(self, share: float) -> None:
        for weight in self._weights:
            weight.set(share)

    def _start_statistics(self, model: int) -> None:
        now = self.balancer.iteration
        weight = 1 / self.workers.count if now is None or self._after_the_loop else by_samples(now.share)
        self._statistics[model].start(weight)

    def _finish_statistics(self) -> None:
        for statistics in self._statistics:
            try:
                with self.balancer.activity.waiting():
                    statistics.finish()
            except RuntimeError as error:
                self._fail(error)

    def _collect(self) -> None:
        """Await the exchange and check that the workers agree; raise what has failed since."""
        self._finish_statistics()
        try:
            with self.balancer.waiting():
                table = self._exchange.finish()
        except RuntimeError as error:
            self._fail(error)
            table = None
        if self._failure is not None:
            raise self.explained(self._failure) from self._failure
        if table is None:
            return
        now = self.balancer.iteration
        if now is not None and now.paused is not None:
            now.synchronised_seconds = self._clock() - now.paused
        require_same_plan(lambda: gather(self.workers, self._plan()), table[:, 0])
        self.reports, self._outside = Reports.from_table(table[:, 3:]), table[:, 1:3]

    def _fail(self, cause: Exception) -> None:
        """Keep the first failure; a communication thread may be the one that meets it."""
        if self._failure is None:
            self._failure = cause

    def explained(self, cause: Exception) -> EvenstepError:
        """The error to raise after a collective failed with `cause`; nothing is stepped after it."""
        self._failure = explained(cause, self._liveness, self._wait)
        return self._failure


def _tensor(value: Any) -> torch.Tensor:
    """What a reduction's future holds: c10d gives a list of one tensor, a user's hook a tensor."""
    return cast("torch.Tensor", value[0] if isinstance(value, list) else value)


def _completed(value: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(value)
    return future
