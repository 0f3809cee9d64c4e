"""The local engine: each worker trains alone for some iterations, then all average their models (local SGD)."""

from collections.abc import Callable, Sequence
from typing import final

import numpy as np
import torch
import torch.distributed as dist

from evenstep.core.disagreement import require_same_plan
from evenstep.core.errors import DisagreementError, EvenstepError
from evenstep.core.samples import Ledger, MicroBatch, Share, Shares, ends_period
from evenstep.core.values import IntArray, Reports
from evenstep.core.workers import minority, name_workers
from evenstep.torch.engines.average import (
    agree_on_step_counts,
    average,
    averaged_tensors,
    digest,
    digest_of_counts,
    step_counts,
)
from evenstep.torch.processes.exchange import Exchange
from evenstep.torch.processes.liveness import Liveness, explained
from evenstep.torch.processes.workers import Workers, gather
from evenstep.worker.balancer import Balancer
from evenstep.worker.iteration import Iteration, units_of


@final
class LocalEngine:
    """An `Engine` whose workers step alone and meet every `period` iterations.

    What was computed on between two averages is one iteration to the balancer and in the event log. The average takes
    place when the script asks for the next batch, so after its optimizer has stepped.
    """

    def __init__(
        self,
        *,
        workers: Workers,
        balancer: Balancer,
        period: int,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        wait: Callable[[float], None],
        clock: Callable[[], float],
        liveness: Liveness | None = None,
    ) -> None:
        self.balancer = balancer
        self.workers = workers
        self._period = period
        self._models = models
        self._optimizers = optimizers
        self._clock = clock
        self._wait = wait
        self._liveness = liveness
        self._exchange = Exchange(self.workers, columns=6 + Reports.columns())
        self._reports: Reports | None = None
        self._outside: IntArray = np.zeros((self.workers.count, 2), dtype=np.int64)
        self._units = 0
        self._count = 0
        self._weighed = False
        self._in_hand = False
        self._begun_at = 0.0
        if self.workers.device_group is not None:
            # As DistributedDataParallel does: all start from the first worker's model.
            for model in models:
                for tensor in (*model.parameters(), *model.buffers()):
                    dist.broadcast(tensor.detach(), group=self.workers.device_group, group_src=0)

    # The loader's side.

    def enter_loader(self) -> None:
        self._come_in(meet=False)

    def _come_in(self, *, meet: bool) -> None:
        """The iteration in hand is over: hold the worker where it is emulated, and `meet` the others or where due."""
        self.balancer.compute_pauses()
        now = self.balancer.iteration
        if now is not None and self._in_hand:
            self._finish(now)
            meet = meet or ends_period(now.share, self._period)
        if now is not None and meet:
            try:
                with self.balancer.activity.waiting(now.number + 1):
                    self._meet(now)
            except (RuntimeError, EvenstepError) as error:
                raise self.explained(error) from error
        self.balancer.enter_loader()
        if self._reports is not None:
            self.balancer.learn(self._reports, self._outside)
            self._reports = None

    def _finish(self, now: Iteration) -> None:
        """Count what was computed on, and hold the worker where it is emulated."""
        self._in_hand = False
        self._units += self._count
        hold = self.balancer.hold
        if hold is not None:
            elapsed = self.balancer.compute_seconds() - self._begun_at
            self.balancer.resume()
            hold.until_due(iteration=now.number, batch_sizes=now.batch_sizes[-1:], elapsed_seconds=elapsed)
            self.balancer.compute_pauses()

    def shares(self, ledger: Ledger, *, epoch: int, depth: int) -> Shares:
        return self.balancer.shares(ledger, epoch=epoch, depth=depth)

    def leave_loop(self) -> None:
        self.balancer.leave_loop()

    def begin(self, share: Share, piece: MicroBatch, epoch: int) -> None:
        before = self.balancer.iteration
        goes_on = before is not None and before.paused is None
        self._begun_at = self.balancer.compute_seconds() if goes_on and self.balancer.hold is not None else 0.0
        if self.balancer.hold is not None:
            self.balancer.hold.begin_iteration()
        self.balancer.begin(share, piece, epoch)
        self._in_hand = True
        self._count = piece.samples

    def weigh_by(self, count: int) -> None:
        """The averages then weigh each worker by the units that it counted, instead of by samples."""
        self._count = units_of(self.balancer.iteration, count)
        self._weighed = True

    def explained(self, cause: Exception) -> EvenstepError:
        return explained(cause, self._liveness, self._wait)

    def close(self) -> None:
        self.balancer.close()
        if self._liveness is not None:
            self._liveness.close()
        self.workers.leave()

    # The model's and the optimizer's side.

    @property
    def synchronises(self) -> bool:
        return True

    @property
    def unsettled(self) -> str | None:
        now = self.balancer.iteration
        if self.workers.count == 1 or now is None or now.paused is not None:
            return None
        return "each worker's weights are its own until the next average: call loader.settle() on all before saving"

    def settle(self) -> None:
        with self.balancer.activity.waiting():  # Afterwards the script does what it did, and asks for no batch.
            self._come_in(meet=self.unsettled is not None)

    def forward_begins(self, model: int, *, synchronises: bool) -> None:
        self.balancer.resume()

    def forward_ends(self, outputs: object) -> None:
        """No gradient is stale here, so a learning rate that goes well in one process does so too."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """A copy of somebody else's sample teaches nothing: its gradients are dropped."""
        self.balancer.steps()
        now = self.balancer.iteration
        if now is not None and self._in_hand and not now.share.samples:
            for model in self._models:
                for parameter in model.parameters():
                    parameter.grad = None

    # In between.

    def _meet(self, now: Iteration) -> None:
        """Average the models, and exchange what everybody has measured."""
        now.paused = self._clock()
        named = averaged_tensors(self._models, self._optimizers)
        counts = step_counts(self._optimizers)
        seen = now.fingerprint(weighed=self._weighed)
        kinds = digest({**named, "counts": counts})
        row = [seen, self._units, kinds, digest_of_counts(counts), *now.outside, *self.balancer.row(now)]
        self._exchange.start(row)
        table = self._exchange.finish()
        assert table is not None
        require_same_plan(lambda: gather(self.workers, now.plan(weighed=self._weighed)), table[:, 0])
        odd = minority([str(value) for value in table[:, 2].tolist()])
        if odd:
            raise DisagreementError(
                f"{name_workers(odd)} had other weights or optimizer state to average than the others: every worker"
                " must step the same parameters before the first average"
            )
        total = int(table[:, 1].sum())
        if total:
            self._average(list(named.values()), self._units / total)
            if len(set(table[:, 3].tolist())) > 1:
                self._agree_on(counts)
        self.balancer.synchronised()
        now.synchronised_seconds = self._clock() - now.paused
        self._units, self._weighed = 0, False
        self._reports, self._outside = Reports.from_table(table[:, 6:]), table[:, 4:6]

    def _average(self, tensors: Sequence[torch.Tensor], weight: float) -> None:
        if self.workers.device_group is not None:
            average(tensors, weight, self.workers.device_group)

    def _agree_on(self, counts: torch.Tensor) -> None:
        if self.workers.host_group is not None:
            agree_on_step_counts(self._optimizers, counts, counted=self._units > 0, group=self.workers.host_group)
