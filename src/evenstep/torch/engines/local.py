"""The local engine: workers train alone for some iterations, then average their models (local SGD)."""

import time
from collections.abc import Sequence
from typing import final

import numpy as np
import torch
import torch.distributed as dist

from evenstep.core.errors import ConfigError, DisagreementError, EvenstepError
from evenstep.core.samples import ends_period
from evenstep.core.workers import minority, name_workers
from evenstep.schemes import Scheme
from evenstep.tensors.messages import all_finite
from evenstep.torch.engines.average import agree_on_step_counts, average, averaged_tensors, digest, step_counts
from evenstep.torch.engines.engine import Engine
from evenstep.torch.engines.reports import ReportExchange
from evenstep.torch.processes.liveness import Liveness
from evenstep.torch.processes.workers import Workers
from evenstep.worker.hand_outs import HandedOut
from evenstep.worker.iteration import Iteration
from evenstep.worker.nonfinite import NonfiniteGuard
from evenstep.worker.tracker import Tracker


@final
class LocalEngine(Engine):
    """Workers step alone and average their models every `period` iterations.

    All iterations between two averages are one iteration to the balancer and in the event log. The average takes place
    when the script asks for the next batch, after its optimizer has stepped.
    """

    def __init__(
        self,
        workers: Workers,
        balancer: Tracker,
        liveness: Liveness | None,
        *,
        scheme: Scheme,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        super().__init__(workers, balancer, liveness)
        assert scheme.period is not None
        self._period = scheme.period
        self._nonfinite = None if scheme.nonfinite == "spread" else NonfiniteGuard(scheme.nonfinite, balancer)
        self._models = models
        self._optimizers = optimizers
        self._exchange = ReportExchange(workers, balancer)
        self._units = 0.0
        self._count = 0.0
        self._weighed = False
        self._in_hand = False
        self._began_at = 0.0
        self._stepped: set[int] = set()
        if workers.device_group is not None:
            # As under DistributedDataParallel, all workers start from the model of worker 0.
            for model in models:
                for tensor in (*model.parameters(), *model.buffers()):
                    dist.broadcast(tensor.detach(), group=workers.device_group, group_src=0)

    def enter_loader(self) -> None:
        now = self.hand_outs.in_hand
        if now is None or now.finished:
            self._end_iteration(meet=False)
        else:
            self.balancer.enter_loader(ended=False)

    def batch_ends(self) -> None:
        now = self.hand_outs.in_hand
        if now is not None and not now.finished and ends_period(now.share, self._period):
            raise ConfigError(
                "the models are to be averaged after a batch whose backward has not run when the next one begins: run"
                " the backward of a batch before the forward pass of the next"
            )
        self._end_iteration(meet=False)

    def _end_iteration(self, *, meet: bool) -> None:
        """Finish the iteration in hand; average if `meet` is set or the period is over."""
        self.balancer.stopwatch.pause()
        now = self.balancer.iteration
        if now is not None and self._in_hand:
            self._finish()
            meet = meet or ends_period(now.share, self._period)
        if now is not None and meet:
            try:
                with self.balancer.activity.waiting(now.number + 1):
                    self._meet(now)
            except (RuntimeError, EvenstepError) as error:
                raise self.explained(error) from error
        self.balancer.enter_loader()
        self._exchange.learn()

    def _finish(self) -> None:
        """Count the batch in hand, and hold the worker if slowness is emulated."""
        self._in_hand = False
        self._units += self._count
        self.balancer.batch_ends(self._began_at)

    def begin(self, batch: HandedOut) -> None:
        before, hold = self.balancer.iteration, self.balancer.hold
        goes_on = before is not None and before.paused is None
        self._began_at = self.balancer.stopwatch.read() if goes_on and hold is not None else 0.0
        if hold is not None:
            hold.begin_iteration()
        self.balancer.begin(batch.share, batch.piece, batch.epoch, batch.origin.number)
        self._in_hand = True
        self._stepped.clear()
        self._count = batch.piece.samples
        if batch.units is not None:
            self.weigh(batch)

    def weigh(self, batch: HandedOut) -> None:
        self._count = batch.units
        self._weighed = True

    @property
    def unsettled(self) -> str | None:
        now = self.balancer.iteration
        if self.workers.count == 1 or now is None or now.paused is not None:
            return None
        return "each worker's weights are its own until the next average: call loader.settle() on all before saving"

    def settle(self) -> None:
        with self.balancer.activity.waiting():  # Afterwards the script goes on, and asks for no batch.
            self._end_iteration(meet=self.unsettled is not None)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop the gradients if the batch is a copy of another worker's sample."""
        self.check_batch(optimizer)
        self.balancer.steps()
        if self.hand_outs.in_hand is not None:
            self.hand_outs.in_hand.closed = True
        now = self.balancer.iteration
        if now is not None and self._in_hand and not now.share.samples:
            for model in self._models:
                for parameter in model.parameters():
                    parameter.grad = None

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Average here after the last batch, if the loop ended before it was computed."""
        self._stepped.add(id(optimizer))
        last = self._loop_over and self._in_hand and not self.hand_outs.ahead
        if last and self._stepped.issuperset(map(id, self._optimizers)):
            with self.balancer.activity.waiting():
                self._end_iteration(meet=False)

    def _meet(self, now: Iteration) -> None:
        """Average the models, and exchange the reports of all workers."""
        now.paused = time.perf_counter()
        named = averaged_tensors(self._models, self._optimizers)
        counts = step_counts(self._optimizers)
        kinds = [(name, tuple(each.shape), each.dtype) for name, each in {**named, "counts": counts}.items()]
        finite = self._nonfinite is None or all_finite(named.values())
        counted = self._units if finite else 0.0
        # A row has integers: the bits of a float.
        extra = (int(np.float64(counted).view(np.int64)), digest(kinds), digest(counts.tolist()))
        self._exchange.start(self._exchange.row(now, weighed=self._weighed, extra=extra))
        table = self._exchange.wait()
        assert table is not None
        units, digests, steps = self._exchange.check(table).T
        odd = minority([str(each) for each in digests.tolist()])
        if odd:
            raise DisagreementError(
                f"{name_workers(odd)} had other weights or optimizer state to average than the others: every worker"
                " must step the same parameters before the first average"
            )
        total, group = float(np.ascontiguousarray(units).view(np.float64).sum()), self.workers.device_group
        if self._nonfinite is not None and not finite:
            self._nonfinite.skip(now, finite=bool(total))
        if total and group is not None:
            average(list(named.values()), counted / total, group)
            if len(set(steps.tolist())) > 1:
                assert self.workers.host_group is not None
                agree_on_step_counts(self._optimizers, counts, counted=counted > 0, group=self.workers.host_group)
        self.balancer.stopwatch.synchronised()
        now.synchronised_seconds = time.perf_counter() - now.paused
        self._units, self._weighed = 0.0, False
