"""The collective engine: schemes with a barrier, on DistributedDataParallel or FSDP2.

Its communication hook weighs each worker's gradient by its share and stops the clock of compute. Each worker runs its
own predictor; the workers exchange integers and run the same allocation on them.
"""

import cmath
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast, final

import torch
import torch.distributed as dist

from evenstep.core.activity import Doing
from evenstep.core.errors import ConfigError, EvenstepError
from evenstep.core.load.equal import Equal
from evenstep.core.samples import by_samples
from evenstep.launch.c10d import GradBucket, completed, start_sum, work_of
from evenstep.schemes import Scheme
from evenstep.torch.engines.direct_sum import DirectSum
from evenstep.torch.engines.engine import Engine
from evenstep.torch.engines.left_out import LeftOut
from evenstep.torch.engines.loss_scale import LossScale
from evenstep.torch.engines.reports import ReportExchange
from evenstep.torch.engines.sketches import sketches_of
from evenstep.torch.engines.summing_group import SummingGroup
from evenstep.torch.engines.weighting import SummedModel, UnitCount, Weights, weight_function
from evenstep.torch.processes.liveness import Liveness
from evenstep.torch.processes.workers import Workers, gather
from evenstep.worker.hand_outs import HandedOut
from evenstep.worker.replicas import Replicas
from evenstep.worker.tracker import Tracker

if TYPE_CHECKING:
    from evenstep.torch.data.own_data import OwnData

Reduced: TypeAlias = torch.futures.Future[torch.Tensor]
CommHook: TypeAlias = tuple[Any, Callable[[Any, GradBucket], Reduced]]
"""A state and an averaging DDP communication hook, as `register_comm_hook` takes them."""


@final
class CollectiveEngine(Engine):
    """Sums gradients over all workers in every iteration."""

    def __init__(
        self,
        workers: Workers,
        tracker: Tracker,
        liveness: Liveness | None,
        *,
        scheme: Scheme,
        weights: Weights,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        accumulation: int = 1,
    ) -> None:
        super().__init__(workers, tracker, liveness)
        self._models = [SummedModel(model, workers) for model in models]
        self._averages_statistics = any(model.statistics is not None for model in self._models)
        devices = {parameter.device.type for model in models for parameter in model.parameters()}
        self.on_host = workers.on_host and devices <= {"cpu"}
        # Weak references: the optimizers' hooks refer to this engine and so to the data workers.
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._weight_of, self._part_weight = weight_function(weights, scheme, workers.count, accumulation)
        self._accumulation = accumulation
        self._sums_to_one = weights == "samples"
        self._blocking = scheme.exchange == "blocking"
        self.accumulates = scheme.accumulates
        self._one_at_a_time = "accumulation or micro_batch" if self.accumulates else ""
        self._alone = self.accumulates and workers.count == 1
        self._exchange = ReportExchange(workers, tracker.meter)
        self._failure: Exception | None = None
        self._sums: list[dist.Work] = []  # Sums of buckets under way, on hosts.
        self._direct = DirectSum(workers)
        self._units: UnitCount | None = None
        """The count from `weigh_by`, until the weight is set."""
        self._weighed = False
        self._pieces: list[HandedOut] = []
        """The micro-batches of the current iteration that have begun."""
        self._divisor = 1.0
        """The units of all workers in the current iteration, if its micro-batches are weighed by units."""
        self._report_due = False
        self._told: OwnData | None = None
        """The loop of which the last report tells."""
        self._unsummed_steps = 0
        """The optimizers' steps since gradients were last summed."""
        self._steps = 0
        self._stepped_after_loop = False
        self._warned = False
        unlike = workers.count > 1 and not isinstance(scheme.load, Equal)
        looks = unlike and self._sums_to_one and scheme.weighting == "samples" and not self.accumulates
        sharded = any(hasattr(each, "device_mesh") for model in models for each in model.parameters())
        by_norms = not self._averages_statistics
        self._scale = LossScale(workers, by_norms=by_norms, sharded=sharded) if looks else None
        guards = workers.count > 1 and self._sums_to_one and scheme.nonfinite != "spread"
        self._left_out = LeftOut(scheme.nonfinite, tracker, self._models) if guards else None
        self._replicas: Replicas | None = None
        if workers.host_group is not None:
            remedy = "decide by loader.mean_over_workers, draw from one seed"
            # A method of the engine would keep it in a cycle, and the run's summary comes when the engine goes.
            self._replicas = Replicas(partial(gather, workers), partial(sketches_of, models), remedy)
        if self._alone:
            for model in self._models:
                model.apply_by_itself()

    # The loader's side.

    def enter_loader(self, *, ended: bool = False) -> None:
        now = self.hand_outs.in_hand
        self.tracker.enter_loader(ended=ended or now is None or now.closed or now.finished)
        if (
            self._report_due
            or self._exchange.rows is not None
            or self._failure is not None
            or self._averages_statistics
        ):
            with self.tracker.waiting():
                self._collect()  # The optimizer did not step.
        self.tracker.learn()

    def batch_ends(self) -> None:
        self.enter_loader(ended=True)

    def begin(self, batch: HandedOut) -> None:
        self.tracker.begin(batch.share, batch.piece, batch.epoch, batch.origin.number)
        self._units, self._weighed = batch.units, batch.units is not None
        if self._scale is not None:
            self._scale.begins(batch)
        assert batch.weight is not None
        for model in self._models:
            if model.changes is not None:
                model.begins(model.changes, first=batch.piece.first)
        if self.accumulates:
            self._begin_piece(batch, batch.weight)
            return
        for model in self._models:
            if model.weight != batch.weight or model.idle or model.accumulating:
                model.set(batch.weight)

    def _begin_piece(self, batch: HandedOut, weight: float) -> None:
        self.window.begins(batch.piece)
        if batch.piece.first:
            self._pieces, self._divisor = [], 1.0
        self._pieces.append(batch)
        if self._pieces[0].units is None or batch.piece.first:
            self._set(batch, weight)  # Otherwise `weigh` follows, and a weight before it would change gradients twice.

    def _set(self, batch: HandedOut, weight: float) -> None:
        for model in self._models:
            (model.set_first if batch.piece.first else model.set)(weight)

    def close(self) -> None:
        for model in self._models:
            model.close()
        super().close()

    def units_of_all(self, units: float) -> UnitCount | float:
        return units if self.accumulates else UnitCount(units, self.workers.host_group).start()

    def weigh(self, batch: HandedOut) -> None:
        if self.accumulates:
            self._weigh_in_window(batch)
            return
        if self._scale is not None:
            self._scale.rests()
        self._units, self._weighed, self._scale = batch.units, True, None
        if any(model.accumulating for model in self._models):
            self._settle_weight()  # Before this gradient is added to others with another weight.

    def _weigh_in_window(self, batch: HandedOut) -> None:
        """Weigh a micro-batch by its own units; all are divided by those of the whole iteration, known at its end."""
        self._weighed = True
        self._set(batch, self._accumulation * batch.units)
        if not batch.piece.last:
            return
        self._require_all_weighed()
        self._units = UnitCount(sum(each.units for each in self._pieces), self.workers.host_group)
        if self._alone:
            self._set(batch, self._accumulation * batch.units / self._divide())

    def _require_all_weighed(self) -> None:
        if len({each.units is None for each in self._pieces}) > 1:
            raise ConfigError(
                "weigh_by was called for some batches of a step and not for others: call it for each batch"
            )

    def _divide(self) -> float:
        """Divide what a single worker has accumulated by the units of the iteration, and return these."""
        assert self._units is not None
        total, self._units = self._units.total(), None
        for model in self._models:
            model.divide(total / self._divisor)
        self._divisor = total
        return total

    # The model's side.

    def reduction_begins(self, model: int, *, synchronises: bool) -> None:
        own = self._models[model]
        if self._averages_statistics:
            self._finish_statistics()  # The average must not overwrite the statistics of this pass.
        own.reduces, own.expected, own.sent = synchronises, synchronises, 0
        if own.looked_at and not own.accumulating:
            own.forget_looks()
        if self.tracker.iteration is None:
            return
        if self._all_done:
            own.set(1 / self.workers.count)
            return
        if not synchronises:
            own.adds_up()
        if not synchronises and not self._alone:
            self._settle_weight()
            own.accumulating = True
        if self._scale is not None and self._scale.looks:
            self._scale.loss_begins()
        if not self.tracker.stopwatch.running:
            self.tracker.stopwatch.run()

    def _backward_begins(self, model: int, batch: HandedOut, gradient: torch.Tensor | None) -> None:
        batch.open, batch.backward = False, True
        if batch is not self.hand_outs.in_hand:
            super()._backward_begins(model, batch, gradient)
        if self._models[model].kept:
            self._models[model].look()
        if self.accumulates:
            self._require_all_weighed()
            if self._units is not None:
                self._units.start()  # Not before the forward pass: in that of its first piece a worker communicates.
        elif self.workers.count > 1 and not (self._sums_to_one and batch.units is None):
            self._models[model].keep_sum()
        if gradient is None:
            return  # PyTorch gives none for an output that the loss does not depend on.
        if self._scale is not None and self._scale.looks:
            self._scale.backward_begins(gradient)
        if self._left_out is not None and gradient.dtype is not torch.float16:
            total = gradient.sum()
            if not total.is_cpu or not cmath.isfinite(total.item()):
                self._left_out.look_at(model, total)

    def sum_in(self, group: SummingGroup, model: int) -> None:
        """Sum the gradients of that model in this group."""
        assert self.workers.device_group is not None
        own = self._models[model]
        own.group, own.bytes = weakref.ref(group), group.bytes
        group.group, group.sum = self.workers.device_group, partial(self.communicate, model, None)

    def communicate(
        self, model: int, comm_hook: CommHook | None, gradients: torch.Tensor, bucket: GradBucket | None = None
    ) -> Reduced | dist.Work:
        """Sum a bucket's gradients over all workers, weighted.

        Without `bucket` they are on hosts, and DDP has divided them by the number of workers; it takes the operation's
        result. Of its communication hook it takes a future.
        """
        own = self._models[model]
        last = own.sent + gradients.nbytes == own.bytes if bucket is None else bucket.is_last()
        try:
            if self._failure is None:
                if self._units is not None or self.tracker.iteration is None:
                    self._settle_weight()
                if last:
                    self._compute_ends(own)
                own.apply(gradients, bucket, (1 if comm_hook is None else self.workers.count) / self._divisor)
                if self._scale is not None and self._scale.looks:
                    self._scale.summed(gradients)
                if bucket is None:
                    own.sent += gradients.nbytes
                    return self._reduce_on_host(model, gradients, last=last, divided=True)
                if self.on_host and comm_hook is None:
                    self._reduce_on_host(model, gradients, last=last, divided=False)
                    return completed(gradients)
                return self._reduce_by_hook(model, comm_hook, gradients, bucket, last=last)
        except (RuntimeError, EvenstepError) as error:
            self._fail(error)
        return completed(gradients) if bucket is not None else cast("dist.Work", work_of(completed(gradients)))

    def _reduce_by_hook(
        self, model: int, comm_hook: CommHook | None, gradients: torch.Tensor, bucket: GradBucket, *, last: bool
    ) -> Reduced:
        if comm_hook is None:
            work = dist.all_reduce(gradients, group=self.workers.device_group, async_op=True)
            reduced = work.get_future()
        else:
            reduced = comm_hook[1](comm_hook[0], bucket)
        if last:
            self._overlap_report()
            self._start_statistics(model)
        return cast("Reduced", reduced.then(lambda future: self._reduced(future, gradients, last=last)))

    def _reduce_on_host(self, model: int, gradients: torch.Tensor, *, last: bool, divided: bool) -> dist.Work:
        """Start to sum a bucket; with the last one, wait for all, since nothing is left to overlap with.

        DistributedDataParallel reads no bucket before the last one, so no thread has to wake up to pass a bucket on.
        Returns an operation with this bucket as its result: the first one on it, also if it is summed otherwise now.
        """
        assert self.workers.device_group is not None
        if not last:
            self._sums.append(work := start_sum(gradients, self.workers.device_group))
            return work
        own, small = self._models[model], not gradients.is_sparse and gradients.nbytes <= self._direct.most_bytes
        if divided and own.last_place != (place := gradients.data_ptr()):
            own.last_place, own.last_sum = place, start_sum(gradients, self.workers.device_group)
            self._sums.append(own.last_sum)
            self._overlap_report()  # After the gradients, which all workers wait for.
        elif small and self._report_due and not self._blocking:
            if self._exchange.work is not None:
                self._exchange.wait()
            self._exchange.rows = self._direct.sum(gradients, self._row)
        else:
            self._direct.sum_larger(gradients, self._overlap_report)
        while self._sums:
            self._sums.pop(0).wait()
        if self._averages_statistics:
            self._start_statistics(model)
        self.tracker.mark(Doing.COMPUTING)
        return own.last_sum  # type: ignore[no-any-return]

    def _reduced(self, future: torch.futures.Future[Any], local: torch.Tensor, *, last: bool) -> torch.Tensor:
        """The sum over all workers; the local gradients after a failure, which is kept."""
        try:
            if last:
                self.tracker.mark(Doing.COMPUTING)
            value = future.value()
        except RuntimeError as error:
            self._fail(error)
            return local
        # c10d gives a list of one tensor, a user's hook a tensor.
        return cast("torch.Tensor", value[0] if isinstance(value, list) else value)

    def weigh_sharded(self, model: int, gradients: torch.Tensor) -> None:
        """Weigh a sharded model's gradients in place, before they are summed over all workers."""
        if self._units is not None or self.tracker.iteration is None:
            self._settle_weight()
        self._models[model].apply_whole(gradients)
        if self._scale is not None and self._scale.looks:
            self._scale.summed(gradients)

    def backward_ends(self, model: int) -> None:
        """End a backward of a sharded model, whose gradients are summed; compute ended when the last were sent."""
        self.tracker.stopwatch.drop()
        self._compute_ends(self._models[model])
        self._overlap_report()
        self._start_statistics(model)
        self.tracker.mark(Doing.COMPUTING)

    # The optimizer's side.

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that all workers did the same iteration with the same sizes, and that gradients were summed."""
        now = self.tracker.iteration
        if self._strayed or self._mixed or self._stepped_outside is not None:
            self.check_batch(optimizer)
        if self.accumulates and not self.synchronises:
            raise ConfigError(
                "the optimizer was stepped between two micro-batches of an iteration: step the one that prepare"
                " returned, which waits for the last of them"
            )
        if self.workers.device_group is None and now is not None and now.paused is None:
            self._compute_ends()
        self._collect()
        for model in self._models:
            watch = model.watch
            if watch is not None and (watch.local or watch.frozen):
                watch.require_summed(optimizer, reduces=model.reduces)
        if (batch := self.hand_outs.in_hand) is not None and not batch.closed:
            self.require_summed()
            # One step may come late, and after a summed gradient any number of steps.
            if self._unsummed_steps and self.hand_outs.ahead and self.workers.count > 1:
                self._require_backward(optimizer)
        self._unsummed_steps += 1
        if self._left_out is not None and self._left_out.due:
            self._left_out.before_step()
        self.tracker.mark(Doing.STEPPED)
        self._steps += 1
        if self._stepped_after_loop and not self._warned:
            self._warned = True
            warnings.warn(
                "the optimizer steps on a batch after the loop over the prepared loader has ended, where every worker's"
                " gradient counts alike: loop over the loader again for each epoch (itertools.cycle hands out old"
                " batches, whose sizes are not known any more)",
                stacklevel=2,
            )

    def _require_backward(self, optimizer: torch.optim.Optimizer) -> None:
        gradients = (each.grad for group in optimizer.param_groups for each in group["params"])
        if any(each is not None and each.count_nonzero() for each in gradients):
            raise ConfigError(
                "the optimizer steps on gradients that no backward of a prepared model has summed over the workers, as"
                " those that a script sets by hand: run backward() on a loss of what the model that prepare returned"
                " gave, or sum gradients in a loop of your own (docs/any-framework.md)"
            )

    def require_summed(self) -> None:
        batch = self.hand_outs.in_hand
        if batch is None or batch.closed or self.workers.count == 1 or not batch.backward or self._all_done:
            return
        raise ConfigError(
            "the gradients of the current batch were not summed over the workers, as those of torch.autograd.grad are"
            " not, nor any after a parameter was frozen after prepare or an optimizer stepped within the backward: run"
            " backward() on a loss of what the model that prepare returned gave"
        )

    # In between.

    def _compute_ends(self, model: SummedModel | None = None) -> None:
        """Stop the clock of compute: gradients are complete, and those of `model` are on their way to all workers."""
        if model is not None:
            model.reduces, model.accumulating = None, False
            if model.watch is not None:
                model.watch.local.clear()
        now = self.tracker.iteration
        if now is None:
            return
        if self._all_done:
            self._stepped_after_loop = True
            return
        if self.accumulates and now.paused is not None:
            raise ConfigError(
                "a second backward on a batch does not go with accumulation or micro_batch: add the losses up and run"
                " one backward"
            )
        self._unsummed_steps = 0
        self.tracker.compute_ends()
        if self.hand_outs.in_hand is not None:
            self.hand_outs.in_hand.closed = True
        self._report_due = True

    def _overlap_report(self) -> None:
        """Send this worker's report while its gradients are under way, unless the scheme waits for them first."""
        if self._report_due and not self._blocking:
            self._exchange.start(self._row())

    def _row(self) -> list[int]:
        """This worker's report on the iteration, which is no longer due."""
        now, self._report_due = self.tracker.iteration, False
        assert now is not None
        rates = []
        for reference in self._optimizers:
            for group in () if (optimizer := reference()) is None else optimizer.param_groups:
                # A tensor may be on a device, and reading it would wait for that device.
                if "lr" in group and not isinstance(group["lr"], torch.Tensor):
                    rates.append(group["lr"])
        self._told = self.own
        extra = [] if self.own is None else [self.own.word]
        if self.workers.peers is not None:
            batch = self.hand_outs.in_hand
            extra.append(0 if batch is None else batch.checksum)
        return self._exchange.row(now, weighed=self._weighed, rates=rates, steps=self._steps, extra=extra)

    def _settle_weight(self) -> None:
        """Set the weight of this backward if that is not done: by units, which the other workers must have counted."""
        units, self._units = self._units, None
        if self.tracker.iteration is None:
            weight = 1 / self.workers.count  # Outside the loop: like DDP and FSDP.
        elif units is None:
            return
        elif self.accumulates:
            with self.meeting(self.tracker.activity.doing(Doing.COUNTING)):
                self._divisor = units.total()
            return
        else:
            with self.meeting(self.tracker.activity.doing(Doing.COUNTING)):
                weight = units.count / units.total()
        for model in self._models:
            model.set(weight)

    def _start_statistics(self, model: int) -> None:
        statistics, now = self._models[model].statistics, self.tracker.iteration
        if statistics is not None:
            outside = now is None or self._all_done
            weight = 1 / self.workers.count if outside or now is None else by_samples(now.share)
            statistics.start(weight, self._models[model].finite)

    def _finish_statistics(self) -> None:
        try:
            with self.tracker.activity.waiting():
                for model in self._models:
                    if model.statistics is not None:
                        model.statistics.finish()
        except RuntimeError as error:
            self._fail(error)

    def _collect(self) -> None:
        """Check that all workers did the same, if reports are there; raise the first failure since the last call."""
        if self._report_due or self._exchange.work is not None or self._averages_statistics or not self.on_host:
            self._finish_exchange()
        if self._failure is not None:
            raise self.explained(self._failure) from self._failure
        now, rows, self._exchange.rows = self.tracker.iteration, self._exchange.rows, None
        if rows is None or now is None:
            return
        if now.paused is not None:
            now.synchronised_seconds = time.perf_counter() - now.paused
        try:
            extra = self._exchange.check(rows)
            if self.workers.peers is not None:
                self.workers.peers.require_same_batches(rows[:, -1])
            if self._told is not None:
                self._told.shares.hear(extra[:, 0])
            if self._replicas is not None and now.number >= self._replicas.looks.at:
                self._replicas.look(now.number, self.meeting())
            if self._scale is not None and self._scale.looks:
                self._end_looks(self._scale)
        except EvenstepError as error:
            self._fail(error)  # Also where the script goes on after it.
            raise

    def _finish_exchange(self) -> None:
        """Send what is due, and wait for what all workers have sent."""
        if not self.on_host:
            self.tracker.stopwatch.synchronised()
        if self._report_due:
            self._exchange.start(self._row())
        if self._averages_statistics:
            self._finish_statistics()
        if self._exchange.work is not None:
            self.tracker.mark(Doing.WAITING)
            try:
                self._exchange.rows = self._exchange.wait()
            except RuntimeError as error:
                self._fail(error)

    def _end_looks(self, scale: LossScale) -> None:
        if scale.ends():
            with self.meeting():
                scale.compare()
            if scale.over:
                self._scale = None

    def compare_replicas(self) -> None:
        if self._replicas is None:
            return
        try:
            self._replicas.compare(self.meeting())
        except EvenstepError as error:
            self._fail(error)
            raise

    def end_loop(self) -> None:
        super().end_loop()
        self.compare_replicas()

    def leave_loop(self) -> None:
        super().leave_loop()
        if self._scale is not None:
            self._scale.rests()

    def _fail(self, cause: Exception) -> None:
        """Keep the first failure. It may occur in a thread of the communication library."""
        if self._failure is None:
            self._failure = cause

    def explained(self, cause: Exception) -> EvenstepError:
        """Like `Engine.explained`; no weight changes afterwards."""
        failure = super().explained(cause)
        self._failure = failure
        return failure
