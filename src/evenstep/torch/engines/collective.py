"""The collective engine: schemes with a barrier, on DistributedDataParallel or FSDP2.

Its communication hook weighs each worker's gradient by its share and stops the clock of compute. Each worker runs its
own predictor; the workers exchange integers and run the same allocation on them.
"""

import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast, final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from evenstep.core.errors import ConfigError, EvenstepError
from evenstep.core.load.equal import Equal
from evenstep.core.samples import by_samples
from evenstep.core.values import IntArray
from evenstep.launch.c10d import GradBucket, completed, start_sum
from evenstep.schemes import Scheme
from evenstep.tensors.messages import all_finite
from evenstep.torch.engines.direct_sum import DirectSum, suits
from evenstep.torch.engines.engine import Engine
from evenstep.torch.engines.loss_scale import LossScale
from evenstep.torch.engines.reports import ReportExchange
from evenstep.torch.engines.summed_model import SummedModel
from evenstep.torch.engines.weighting import GradientWeight, UnitCount, Weights, weight_function
from evenstep.torch.processes.liveness import Liveness
from evenstep.torch.processes.workers import Workers
from evenstep.worker.hand_outs import HandedOut
from evenstep.worker.iteration import Iteration
from evenstep.worker.nonfinite import NonfiniteGuard
from evenstep.worker.tracker import Tracker

Reduced: TypeAlias = torch.futures.Future[torch.Tensor]
CommHook: TypeAlias = tuple[Any, Callable[[Any, GradBucket], Reduced]]
"""A state and an averaging DDP communication hook, as `register_comm_hook` takes them."""


@final
class CollectiveEngine(Engine):
    """Sums gradients over all workers in every iteration."""

    def __init__(
        self,
        workers: Workers,
        balancer: Tracker,
        liveness: Liveness | None,
        *,
        scheme: Scheme,
        weights: Weights,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        super().__init__(workers, balancer, liveness)
        self._models = [SummedModel.of(model, workers) for model in models]
        self._averages_statistics = any(model.statistics is not None for model in self._models)
        devices = {parameter.device.type for model in models for parameter in model.parameters()}
        self._on_host = workers.on_host and devices <= {"cpu"}
        # Weak references: the optimizers' hooks refer to this engine and so to the data workers.
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._weight_of = weight_function(weights, scheme, workers.count)
        self._sums_to_one = weights == "samples"
        self._blocking = scheme.exchange == "blocking"
        self._accumulates = scheme.micro_batch is not None
        self._one_at_a_time = "micro_batch" if self._accumulates else ""
        self._alone = self._accumulates and workers.count == 1
        self._exchange = ReportExchange(workers, balancer)
        self._failure: Exception | None = None
        self._sums: list[dist.Work] = []  # Of buckets, under way, on hosts.
        self._units: UnitCount | None = None
        """What `weigh_by` counted, until the weight is set."""
        self._weighed = False
        self._report_due = False
        self._steps = 0
        self._stepped_after_loop = False
        self._warned = False
        unlike = workers.count > 1 and not isinstance(scheme.load, Equal)
        looks = unlike and self._sums_to_one and scheme.weighting == "samples" and not self._accumulates
        self._scale = LossScale(workers) if looks else None
        guards = workers.count > 1 and self._sums_to_one and scheme.nonfinite != "spread"
        self._nonfinite = NonfiniteGuard(scheme.nonfinite, balancer) if guards else None
        self._finite_before: torch.Tensor | None = None
        if self._alone:
            for model in self._models:
                model.weight.apply_by_itself()

    # The loader's side.

    def enter_loader(self) -> None:
        now = self.hand_outs.in_hand
        self._end_batch(ended=now is None or now.finished)

    def hand_out(self, batch: HandedOut) -> None:
        batch.weight = self._weight_of(batch.share) * batch.piece.portion
        super().hand_out(batch)

    def batch_ends(self) -> None:
        self._end_batch(ended=True)

    def _end_batch(self, *, ended: bool) -> None:
        self.balancer.enter_loader(ended=ended)
        self.balancer.stopwatch.synchronised()
        self._collect()
        self._exchange.learn()

    def begin(self, batch: HandedOut) -> None:
        self.balancer.begin(batch.share, batch.piece, batch.epoch, batch.origin.number)
        self._units, self._weighed = batch.units, batch.units is not None
        if self._scale is not None:
            self._scale.begins(batch)
        assert batch.weight is not None
        self._set_weight(batch.weight)

    def close(self) -> None:
        for model in self._models:
            model.close()
        super().close()

    def units_of_all(self, units: float) -> UnitCount:
        if self._accumulates:
            raise ConfigError(
                "weigh_by does not go with micro_batch, whose number differs from worker to worker: leave out one of"
                " them"
            )
        return UnitCount(units, self.workers.host_group)

    def weigh(self, batch: HandedOut) -> None:
        self._units, self._weighed, self._scale = batch.units, True, None
        for model in self._models:
            model.weight.leave()
        if any(model.weight.accumulating for model in self._models):
            self._settle_weight()  # Before this gradient is added to others of another weight.

    # The model's side.

    @property
    def synchronises(self) -> bool:
        return self.balancer.iteration is None or self.balancer.iteration.piece.last

    def reduction_begins(self, model: int, *, synchronises: bool) -> None:
        own = self._models[model]
        if own.watch is not None:
            own.watch.forward(synchronises=synchronises)
        if self._averages_statistics:
            self._finish_statistics()  # The average must not overwrite the statistics of this pass.
        own.weight.forget()
        if self.balancer.iteration is None:
            return
        if self._after_the_loop:
            own.weight.set(1 / self.workers.count)
            return
        if not synchronises and not self._alone:
            self._settle_weight()
            own.weight.accumulating = True
        own.weight.expect(synchronises=synchronises)
        own.weight.begin(synchronises=synchronises and self._units is None)
        if self._scale is not None and self._scale.looks:
            self._scale.loss_begins()
        self.balancer.stopwatch.run()

    def _backward_begins(self, model: int, batch: HandedOut, gradient: torch.Tensor | None) -> None:
        super()._backward_begins(model, batch, gradient)
        if self.workers.count > 1 and not (self._sums_to_one and batch.units is None):
            self._models[model].weight.keep_sum()
        if gradient is None:
            return  # PyTorch has none for an output without any part in the loss.
        if self._scale is not None and self._scale.looks:
            self._scale.backward_begins(gradient)
        if self._nonfinite is not None and gradient.dtype is not torch.float16:
            self._look_for_nonfinite(self._models[model].weight, gradient)

    def _look_for_nonfinite(self, weight: GradientWeight, gradient: torch.Tensor) -> None:
        """Leave out this worker's gradient if that at the model's output is not finite.

        In float16 an infinity tells a GradScaler on every worker to lower its scale, so there it has to spread.
        """
        finite = gradient.sum().isfinite()
        if not finite.is_cpu or not finite:
            weight.look_at(finite)

    def _count_left_out(self, now: Iteration, guard: NonfiniteGuard) -> None:
        found = [finite for model in self._models if (finite := model.weight.take_finite()) is not None]
        finite = torch.stack(found).all() if found else None
        if finite is not None and not finite.is_cpu:
            finite, self._finite_before = self._finite_before, finite  # The host does not wait for its device.
        if finite is None or finite:
            guard.passed()
        else:
            guard.skip(now, finite=all_finite(each for model in self._models for each in model.weight.parameters))

    def weigh_on_the_way(self, model: int, replica: DistributedDataParallel) -> None:
        """The gradients of this model are views of the replica's buckets."""
        self._models[model].weight.weigh_on_the_way(replica)

    def communicate(self, model: int, comm_hook: CommHook | None, bucket: GradBucket) -> Reduced:
        """The DDP communication hook: the weighted sum of a bucket's gradients over all workers."""
        gradients, last = bucket.buffer(), bucket.is_last()
        if self._failure is not None:
            return completed(gradients)
        try:
            self._weigh_bucket(model, bucket, 1 if comm_hook is None else self.workers.count, last=last)
            if self._on_host and comm_hook is None:
                self._reduce_on_host(model, gradients, last=last)
                return completed(gradients)
            if comm_hook is None:
                work = dist.all_reduce(gradients, group=self.workers.device_group, async_op=True)
                reduced = work.get_future()
            else:
                reduced = comm_hook[1](comm_hook[0], bucket)
            if last:
                self._overlap_report()
                self._start_statistics(model)
        except (RuntimeError, EvenstepError) as error:
            self._fail(error)
            return completed(gradients)
        return cast("Reduced", reduced.then(lambda future: self._reduced(future, gradients, last=last)))

    def _weigh_bucket(self, model: int, bucket: GradBucket, scale: float, *, last: bool) -> None:
        weight = self._settled_weight(model)
        if last:
            self._models[model].summed()
            self._compute_ends()
        weight.apply(bucket, scale, self.workers.count)

    def _reduce_on_host(self, model: int, gradients: torch.Tensor, *, last: bool) -> None:
        """Start to sum a bucket; with the last one, wait for all, since nothing is left to overlap with.

        DistributedDataParallel reads no bucket before the last, so none needs a thread that wakes up to hand it on.
        """
        assert self.workers.device_group is not None
        if not last:
            self._sums.append(start_sum(gradients, self.workers.device_group))
            return
        now = self.balancer.iteration
        if now is not None and self._report_due and not self._blocking and suits(gradients, self.workers):
            direct = DirectSum(gradients, self.workers)
            self._report_due = False
            self._exchange.deliver(direct.finish(self._row(now)))
        else:
            self._sums.append(start_sum(gradients, self.workers.device_group))
            self._overlap_report()  # After the gradients, which all workers wait for.
        for each in self._sums:
            each.wait()
        self._sums.clear()
        if self._averages_statistics:
            self._start_statistics(model)
        self.balancer.waiting_ends()

    def _reduced(self, future: torch.futures.Future[Any], local: torch.Tensor, *, last: bool) -> torch.Tensor:
        """The sum over all workers; the local gradients after a failure, which is kept."""
        try:
            if last:
                self.balancer.waiting_ends()
            value = future.value()
        except RuntimeError as error:
            self._fail(error)
            return local
        # c10d gives a list of one tensor, a user's hook a tensor.
        return cast("torch.Tensor", value[0] if isinstance(value, list) else value)

    def weigh_sharded(self, model: int, gradients: torch.Tensor) -> None:
        """Weigh gradients of a sharded model in place, before they are summed over all workers."""
        self._settled_weight(model).apply_whole(gradients)

    def backward_ends(self, model: int) -> None:
        """A backward of a sharded model is over and its gradients are summed; compute ended when the last were sent."""
        self._models[model].summed()
        self.balancer.stopwatch.drop()
        self._compute_ends()
        self._overlap_report()
        self._start_statistics(model)
        self.balancer.waiting_ends()

    # The optimizer's side.

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that all workers did the same iteration with the same sizes, and that gradients are sums."""
        now = self.balancer.iteration
        self.check_batch(optimizer)
        if not self.synchronises:
            raise ConfigError(
                "the optimizer was stepped between two micro-batches of an iteration: step the one that prepare"
                " returned, which waits for the last of them"
            )
        if self.workers.device_group is None and now is not None and now.paused is None:
            self._compute_ends()
        self.balancer.stopwatch.synchronised()
        self._collect()
        for model in self._models:
            trouble = None if model.watch is None else model.watch.trouble(optimizer)
            if trouble is not None:
                raise ConfigError(trouble)
        self.require_summed()
        if self._nonfinite is not None and now is not None:
            self._count_left_out(now, self._nonfinite)
        self.balancer.steps()
        self._steps += 1
        if self._stepped_after_loop and not self._warned:
            self._warned = True
            warnings.warn(
                "the optimizer steps on a batch after the loop over the prepared loader has ended, where every worker's"
                " gradient counts alike: loop over the loader again for each epoch (itertools.cycle hands out old"
                " batches, whose sizes are not known any more)",
                stacklevel=2,
            )

    def require_summed(self) -> None:
        batch = self.hand_outs.in_hand
        if batch is None or self.workers.count == 1 or not batch.backward or batch.closed or self._after_the_loop:
            return
        raise ConfigError(
            "the gradients of the batch in hand were not summed over the workers, as those of torch.autograd.grad are"
            " not, nor any after a parameter was frozen after prepare or an optimizer stepped within the backward: run"
            " backward() on a loss of what the model that prepare returned gave"
        )

    # In between.

    @property
    def _after_the_loop(self) -> bool:
        """Whether the loop over the loader has ended; gradients then count as in plain training."""
        return self._all_done

    def _compute_ends(self) -> None:
        """This worker's gradient is complete; from here on it only communicates."""
        now = self.balancer.iteration
        if now is None:
            return
        if self._after_the_loop:
            self._stepped_after_loop = True
            return
        if self._accumulates and now.paused is not None:
            raise ConfigError(
                "a second backward in an iteration does not go with micro_batch: add the losses up and run one backward"
            )
        self.balancer.compute_ends()
        if self.hand_outs.in_hand is not None:
            self.hand_outs.in_hand.closed = True
        self._report_due = True

    def _overlap_report(self) -> None:
        """Send this worker's report while its gradients are under way, unless the scheme waits for them first."""
        if not self._blocking:
            self._send_report()

    def _send_report(self) -> None:
        if self._report_due and self.balancer.iteration is not None:
            self._report_due = False
            self._exchange.start(self._row(self.balancer.iteration))

    def _row(self, now: Iteration) -> list[int]:
        rates = [
            group["lr"]
            for reference in self._optimizers
            if (optimizer := reference()) is not None
            for group in optimizer.param_groups
            # A tensor may be on a device, and reading it would wait for the device.
            if "lr" in group and not isinstance(group["lr"], torch.Tensor)
        ]
        return self._exchange.row(now, weighed=self._weighed, rates=rates, steps=self._steps)

    def _settle_weight(self) -> None:
        """If the iteration is weighed by units, wait for the other workers' counts."""
        units, self._units = self._units, None
        if units is None:
            return
        self.balancer.stopwatch.pause()
        try:
            with self.balancer.activity.waiting():
                weight = units.weight()
        except RuntimeError as error:
            raise self.explained(error) from error
        self.balancer.stopwatch.run()
        self._set_weight(weight)

    def _settled_weight(self, model: int) -> GradientWeight:
        if self._units is not None:
            self._settle_weight()
        if self._scale is not None and self._scale.looks:
            self._scale.summed()
        weight = self._models[model].weight
        if self.balancer.iteration is None:
            weight.set(1 / self.workers.count)  # Outside the loop: as DDP and FSDP do.
        return weight

    def _set_weight(self, weight: float) -> None:
        for model in self._models:
            model.weight.set(weight)

    def _start_statistics(self, model: int) -> None:
        statistics, now = self._models[model].statistics, self.balancer.iteration
        if statistics is not None:
            outside = now is None or self._after_the_loop
            weight = 1 / self.workers.count if outside or now is None else by_samples(now.share)
            statistics.start(weight, self._models[model].weight.finite)

    def _finish_statistics(self) -> None:
        for model in self._models:
            if model.statistics is None or not model.statistics.under_way:
                continue
            try:
                with self.balancer.activity.waiting():
                    model.statistics.finish()
            except RuntimeError as error:
                self._fail(error)

    def _collect(self) -> None:
        """Exchange the reports and check that the workers agree; raise what has failed since the last time."""
        if self._report_due:
            self._send_report()
        if self._averages_statistics:
            self._finish_statistics()
        arrived = self._awaited_rows() if self._exchange.pending is not None else None
        if self._failure is not None:
            raise self.explained(self._failure) from self._failure
        if arrived is None:
            return
        now = self.balancer.iteration
        if now is not None and now.paused is not None:
            now.synchronised_seconds = time.perf_counter() - now.paused
        self._exchange.check(arrived)
        if self._scale is not None and self._scale.looks and self._scale.ends():
            self._compare(self._scale)

    def _compare(self, scale: LossScale) -> None:
        try:
            with self.balancer.activity.waiting():
                scale.compare()
        except RuntimeError as error:
            raise self.explained(error) from error
        if scale.over:
            self._scale = None

    def _awaited_rows(self) -> IntArray | None:
        if self._exchange.arrived:
            return self._exchange.wait()
        try:
            with self.balancer.waiting():
                return self._exchange.wait()
        except RuntimeError as error:
            self._fail(error)
            return None

    def _fail(self, cause: Exception) -> None:
        """Keep the first failure, which may occur in a thread of the communication library."""
        if self._failure is None:
            self._failure = cause

    def explained(self, cause: Exception) -> EvenstepError:
        """As `Engine.explained`; no weight changes afterwards."""
        failure = super().explained(cause)
        self._failure = failure
        return failure
