"""The engine of a replica: it sums gradients over the members of the quorum, in steps that may not count."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import final

import torch

from evenstep.core.errors import ConfigError
from evenstep.core.load.limits import SizeLimits
from evenstep.core.load.members import Members
from evenstep.core.samples import Ledger, Lookahead, Request, Share, Shares
from evenstep.launch.c10d import GradBucket, completed
from evenstep.telemetry.events import NotCounted
from evenstep.torch.agree import Terms
from evenstep.torch.elastic.quorum import BrokenQuorumError, Quorum
from evenstep.torch.engines.engine import Engine
from evenstep.torch.engines.left_out import LeftOut
from evenstep.torch.engines.weighting import SummedModel, weight_function
from evenstep.torch.processes.workers import Workers, gather
from evenstep.worker.agreement import Agreed
from evenstep.worker.hand_outs import HandedOut
from evenstep.worker.meter import Rows
from evenstep.worker.tracker import Tracker


@final
class ElasticEngine(Engine):
    """Keeps a replica in step with the members, who may be others in each step.

    A step counts if all that the members sent has arrived, which they ask the quorum before an optimizer steps. If not,
    nothing has changed, and those that are left compute the same slice again.

    Args:
        agreed: What this replica would train alone, on the terms of its loader.
        settle: Agrees with the members if they may be others, and calls `regroup`; False if one was lost meanwhile.

    Attributes:
        at: The epoch and the iteration of the first slice that no step that counted has computed.
        members: The members of the last step that counted; None before the first.
        counted: Whether the last step counted; False before the first.
        groups: How often the members were others.
        depth: The number of slices that all members fetch ahead.
    """

    def __init__(
        self,
        workers: Workers,
        tracker: Tracker,
        quorum: Quorum,
        agreed: Agreed,
        terms: Terms,
        *,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        settle: Callable[[], bool],
    ) -> None:
        super().__init__(workers, tracker)
        self.shares = self._shares_of
        self.at = (0, 0)
        self.members: Members | None = None
        self.counted = False
        self.groups = 0
        self.depth = terms.depth
        self._present: Members | None = None
        self._quorum = quorum
        self._settle = settle
        self._models = [SummedModel(each, workers) for each in models]
        self._optimizers = optimizers
        self._rows = Rows(tracker.meter, partial(gather, workers))
        self._weight_of, _ = weight_function("samples", agreed.scheme, 1, 1)
        nonfinite = agreed.scheme.nonfinite
        self._left_out = None if nonfinite == "spread" else LeftOut(nonfinite, tracker, self._models)
        self._works: list[Callable[[], None]] = []  # Sums under way.
        self._units: tuple[float, torch.Tensor, Callable[[], None]] | None = None
        self._table: torch.Tensor | None = None
        """The rows of all members in this step, once they are under way."""
        self._settled = True
        """Whether the step of the batch that was handed out last is over."""

    # The members.

    def meets(self, epoch: int) -> bool:
        """Meet the other members for the next step; False if this epoch is over, of which others may have told.

        Raises:
            ConfigError: Something cannot work on this replica or on another, which is named.
            DisagreementError: The replicas were started with different things.
        """
        while self.at[0] <= epoch:
            self._quorum.open()
            if not self._quorum.broken and (not self._quorum.changed or self._settle()):
                self._quorum.settled()
                break
            self._quorum.give_up()
        return self.at[0] <= epoch

    def regroup(self, workers: Workers, keys: tuple[int, ...], agreed: Agreed, terms: Terms) -> None:
        """From now on these are the members, who have agreed on this."""
        load, tracker = agreed.scheme.load, self.tracker
        self._present = Members.of(load, keys, self.members)
        problem, limits = replace(agreed.problem, epoch=self.at[0]), SizeLimits(load, agreed.problem, agreed.limits)
        tracker.regroup(workers, self._present.policy, problem, limits, self._quorum.step)
        self._rows = Rows(tracker.meter, partial(gather, workers))
        self.workers = replace(workers, rows=self._rows_of_all)
        self.depth, self.uncounted = terms.depth, 0
        self.groups += 1

    def _rows_of_all(self, row: torch.Tensor) -> torch.Tensor:
        try:
            return self._quorum.rows(row)
        except BrokenQuorumError:
            warnings.warn(
                "a replica was lost in an exchange of the script, whose result is of this one alone", stacklevel=6
            )
            return row.unsqueeze(0)

    # The loader's side.

    def _shares_of(self, ledger: Ledger, *, epoch: int, depth: int) -> Shares:
        self.at = max(self.at, (epoch, ledger.iteration))
        return _QuorumShares(self, ledger, epoch)

    def enter_loader(self) -> None:
        """End the step if the script has not stepped, and learn from it."""
        self.commit()
        self.tracker.enter_loader()
        if self.counted:
            self.tracker.learn()

    def batch_ends(self) -> None:
        self.enter_loader()

    def begin(self, batch: HandedOut) -> None:
        self.tracker.begin(batch.share, batch.piece, batch.epoch, batch.origin.number)
        self._table, self._units, self._settled, self.uncounted = None, batch.units, False, 0
        assert batch.weight is not None
        for model in self._models:
            model.set(batch.weight)

    def units_of_all(self, units: float) -> tuple[float, torch.Tensor, Callable[[], None]]:
        table = self._quorum.table(torch.tensor(units, dtype=torch.float64))
        return units, table, self._quorum.sum(table)

    def weigh(self, batch: HandedOut) -> None:
        self._units = batch.units

    # The model's side.

    def reduction_begins(self, model: int, *, synchronises: bool) -> None:
        super().reduction_begins(model, synchronises=synchronises)
        self._models[model].forget_looks()

    def _backward_begins(self, model: int, batch: HandedOut, gradient: torch.Tensor | None) -> None:
        super()._backward_begins(model, batch, gradient)
        if self._left_out is not None and gradient is not None and gradient.dtype is not torch.float16:
            self._left_out.look_at(model, gradient.sum())

    def communicate(self, model: int, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Weigh a bucket of gradients and begin its sum; the last one waits for all, as DDP reads none before."""
        if self._settled:
            raise ConfigError(
                "a backward ran outside the loop over the session's loader: compute gradients of its batches alone"
            )
        if self._quorum.pending:
            with self.meeting():
                self._quorum.arrive()
        buffer, weighed = bucket.buffer(), self._units is not None
        if self._units is not None:
            (units, table, wait), self._units = self._units, None
            with self.meeting():
                wait()
            for each in self._models:
                each.set(units / (float(table.sum()) or 1.0))
        self._models[model].apply(bucket, buffer)
        self._works.append(self._quorum.sum(buffer))
        if bucket.is_last():
            self._exchange(weighed=weighed)
        return completed(buffer)

    def _exchange(self, *, weighed: bool) -> None:
        tracker = self.tracker
        tracker.compute_ends()
        now = tracker.iteration
        assert now is not None
        rates = [float(group["lr"]) for each in self._optimizers for group in each.param_groups if "lr" in group]
        self._table = self._quorum.table(torch.tensor(self._rows.row(now, weighed=weighed, rates=rates)))
        with tracker.waiting():
            for wait in (*self._works, self._quorum.sum(self._table)):
                wait()
        self._works.clear()
        assert now.paused is not None
        now.synchronised_seconds = tracker.clock() - now.paused

    # The optimizer's side.

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: the session asks `commit` before any step."""

    def commit(self) -> bool:
        """End the step, once; returns whether it counts.

        Raises:
            ConfigError: No backward has run over the batch.
            DisagreementError: The members computed different iterations, or at different learning rates.
            DivergedError: See `LeftOut.before_step`.
        """
        if self._settled:
            return self.counted
        if self._table is None and not self._quorum.broken:
            raise ConfigError(
                "no backward ran over the last batch of the loader: every batch needs one, before the step"
            )
        batch, tracker = self.hand_outs.in_hand, self.tracker
        assert batch is not None
        try:
            if self._table is not None and not self._quorum.broken:
                self._rows.check(self._table.numpy())
        except BrokenQuorumError:
            pass
        batch.closed = self._settled = True
        self.counted = self._quorum.commit()
        if not self.counted:
            self.uncounted, tracker.meter.received = 1, None
            tracker.take_back()
            at, step = tracker.clock(), self._quorum.step
            tracker.recorder.record(NotCounted(worker=self.workers.rank, iteration=step, at=at))
            return False
        self.members = self._present
        self.at = (batch.epoch + 1, 0) if batch.share.ends_epoch else (batch.epoch, batch.share.iteration + 1)
        if self._left_out is not None and self._left_out.due:
            self._left_out.before_step()
        return True


@final
class _QuorumShares:
    """This replica's shares of an epoch, cut anew where the members are others or the position is another.

    The samples that it has requested before are used where it still needs them.
    """

    def __init__(self, engine: ElasticEngine, ledger: Ledger, epoch: int) -> None:
        self._engine = engine
        self._ledger = ledger
        self._epoch = epoch
        self.misses = 0
        self._asked: dict[int, tuple[int, ...]] = {}
        self._inner: Lookahead | None = None
        self._follow()

    def _follow(self) -> bool:
        """Meet the members, and cut for them; False if the epoch is over."""
        engine, groups = self._engine, self._engine.groups
        if not engine.meets(self._epoch):
            return False
        engine.at = max(engine.at, (self._epoch, 0))
        if self._inner is None or engine.groups != groups:
            self._ledger.iteration = engine.at[1]
            self._inner = engine.tracker.shares(
                self._ledger,
                epoch=self._epoch,
                depth=engine.depth,
                asked={**self._asked, **self._inner.asked} if self._inner else {},
            )
        return True

    def share(self) -> Share | None:
        return self._inner.share() if self._follow() and self._inner is not None else None

    def advance(self) -> None:
        assert self._inner is not None
        self._asked = self._inner.asked  # With those of this slice, which is cut again if its step does not count.
        self._inner.advance()

    def replan(self) -> None:
        if self._engine.counted and self._inner is not None:
            before = self._inner.misses
            self._inner.replan()
            self.misses += self._inner.misses - before

    def request(self, limit: int | None, *, whole: bool = False) -> Request | None:
        return None if self._inner is None else self._inner.request(limit, whole=whole)
