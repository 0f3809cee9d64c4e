"""The local engine: workers train alone for some iterations, then average their models (local SGD, DiLoCo)."""

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import numpy as np
import torch
import torch.distributed as dist

from evenstep.core.fragments import cut_into_fragments, due_fragments, leaving_fragments
from evenstep.core.samples import Share
from evenstep.schemes import Scheme
from evenstep.torch.engines.averages import (
    Averaged,
    average,
    begin_anew,
    chunks,
    flat_of,
    kinds_of,
    require_same_kinds,
    split,
    told,
    weights_in,
)
from evenstep.torch.engines.copies import CopiedGradients
from evenstep.torch.engines.engine import UNSETTLED, Engine, counted_units
from evenstep.torch.engines.first_period import FirstPeriod
from evenstep.torch.engines.hierarchical_sum import HierarchicalSum
from evenstep.torch.engines.reports import ReportExchange
from evenstep.torch.processes.liveness import Liveness
from evenstep.torch.processes.workers import Workers, gather
from evenstep.worker.hand_outs import HandedOut
from evenstep.worker.iteration import Iteration
from evenstep.worker.tracker import Tracker


@final
class LocalEngine(Engine):
    """Workers step alone and average their models every `period` iterations, or fragments of them in turn.

    All iterations between two averages count as one iteration for the tracker and in the event log, whatever fragment
    is averaged, and sizes are decided after each; where workers have their own numbers of steps, also after the first
    steps of a run. The average takes place when the script asks for the next batch, after its optimizer has stepped.
    """

    def __init__(
        self,
        workers: Workers,
        tracker: Tracker,
        liveness: Liveness | None,
        *,
        scheme: Scheme,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        super().__init__(workers, tracker, liveness)
        self._period, self._outer = scheme.period_in_iterations, scheme.outer
        self._fragments = scheme.fragments
        self._alpha = 0.0 if self._outer is None else self._outer.alpha
        self._delay = scheme.delay
        self._underway: _Underway | None = None
        # The model that all workers had in common when the period of each parameter began.
        self._began: dict[torch.Tensor, torch.Tensor] = {}
        self._apart, self._alike = False, True
        self._sums = None
        if workers.device_group is not None:
            self._sums = HierarchicalSum(workers, "float32" if self._outer is None else self._outer.wire)
        self._optimizers = optimizers
        self._copies = CopiedGradients(models)
        self._exchange = ReportExchange(workers, tracker.meter)
        self._first = FirstPeriod(self, scheme, self._exchange) if scheme.steps == "speed" else None
        if self._first is not None:
            self.shares = self._first.shares
        self._redivided: Share | None = None
        self._units = [np.nan] * self._fragments
        """Of each fragment since its last average; NaN if no batch was computed."""
        self._weighed = False
        self._in_hand = False
        self._stepped: set[int] = set()
        if workers.device_group is not None:
            # As under DistributedDataParallel, all workers start from the model of worker 0.
            for model in models:
                for tensor in (*model.parameters(), *model.buffers()):
                    dist.broadcast(tensor.detach(), group=workers.device_group, group_src=0)
        self._averaged = Averaged(scheme, models, optimizers, tracker)

    def enter_loader(self) -> None:
        now = self.hand_outs.in_hand
        if now is None or now.finished:
            self._end_iteration(meet=False)
        else:
            self.tracker.enter_loader(ended=False)

    def batch_ends(self) -> None:
        now = self.hand_outs.in_hand
        if now is not None and now.open and not now.closed and self._due(now.piece):
            self._left_open = now
        self._end_iteration(meet=False)

    def _end_iteration(self, *, meet: bool) -> None:
        """Finish the current iteration; average all if `meet` is set, or else the fragments whose period is over."""
        self.tracker.stopwatch.pause()
        now = self.tracker.iteration
        due: tuple[int, ...] = ()
        if now is not None and self._in_hand:
            self._finish()
            due = self._due(now.piece)
            if self._first is not None and not (due or meet):
                self._redivided = self._first.step_ends(now)
            meet = meet or (bool(due) and now.piece.ends_epoch)
            if self._delay and now.piece.last and not meet:
                for fragment in leaving_fragments(now.piece, self._period, self._fragments, self._delay):
                    self._leave(fragment)
        if now is not None and (meet or due):
            with self.meeting(self.tracker.activity.waiting(now.number + 1)):
                self._meet(now, range(self._fragments) if meet else due, settles=meet)
        self.tracker.enter_loader()
        self.tracker.learn()

    def end_loop(self) -> None:
        super().end_loop()
        now = self.hand_outs.in_hand
        if self._fetches_ahead is False and self._in_hand and now is not None and not now.finished:
            while self.hand_outs.ahead:  # The others wait for this worker, though it has skipped the last batches.
                self._continue_with(self.hand_outs.ahead[0])
            self.batch_ends()

    def redivided(self) -> Share | None:
        share, self._redivided = self._redivided, None
        return share

    def _due(self, piece: Share) -> tuple[int, ...]:
        return due_fragments(piece, self._period, self._fragments) if piece.last else ()

    def _finish(self) -> None:
        """Count the current batch, if it was computed, and hold the worker if slowness is emulated."""
        self._in_hand, batch = False, self.hand_outs.in_hand
        if batch is not None and batch.computed:
            count = counted_units((batch,))
            self._units = [float(np.nansum((units, count))) for units in self._units]
        self.tracker.batch_ends()

    def begin(self, batch: HandedOut) -> None:
        if self._outer is not None and self._alike:
            new = (each for each in self._averaged.parameters() if each not in self._began)
            self._began.update({parameter: parameter.detach().clone() for parameter in new})
        self.tracker.batch_begins()
        self.tracker.begin(batch.share, batch.piece, batch.epoch, batch.origin.number)
        self._in_hand, self._alike = True, False
        self._stepped.clear()

    def weigh(self, batch: HandedOut) -> None:
        self._weighed = True

    @property
    def unsettled(self) -> str | None:
        now = self.tracker.iteration
        alone = self.workers.count == 1 and self._outer is None
        if alone or now is None or (self._alike and not self._apart):
            return None
        return UNSETTLED

    def settle(self) -> None:
        with self.tracker.activity.waiting():  # Afterwards the script continues without asking for a batch.
            self._end_iteration(meet=self.unsettled is not None)

    def close(self) -> None:
        if self._sums is not None:
            self._sums.close()
        super().close()

    def start_over(self) -> None:
        self._units = [np.nan] * self._fragments
        self._began.clear()
        self._underway = None
        self._in_hand, self._alike, self._apart = False, True, False

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._step_alone(optimizer, ended=not self._in_hand)

    def after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Called after a step, as a hook: average after the last batch, if the loop ended before it was computed."""
        self._stepped.add(id(optimizer))
        last = self._loop_over and self._in_hand and not self.hand_outs.ahead
        if last and self._stepped.issuperset(map(id, self._optimizers)):
            with self.tracker.activity.waiting():
                self._end_iteration(meet=False)

    def _meet(self, now: Iteration, due: Collection[int], *, settles: bool) -> None:
        """Average these fragments, and exchange the reports of all workers; if it `settles`, all models are alike."""
        reported, now.paused = now.paused is not None, time.perf_counter()
        self._first = None
        averaged = self._averaged
        named, counts = averaged.tensors(), averaged.step_counts()
        trained, cut = self._cut()
        parts = self._parts(named, due)
        underway = self._arrive(discard=settles)
        finite = averaged.finite(named)
        counted = self._units if finite else [np.nan] * self._fragments
        extra = told(kinds_of(*parts.values(), {"counts": counts}), counted)
        self._exchange.start(self._exchange.row(now, weighed=self._weighed, extra=extra))
        table = self._exchange.wait()
        assert table is not None
        kinds, weights = weights_in(self._exchange.check(table))
        if (kinds != kinds[0]).any():
            averaged.complete(partial(gather, self.workers.processes))
            counts, parts = averaged.step_counts(), self._parts(averaged.tensors(), due)
            again = gather(self.workers.processes, {"kinds": kinds_of(*parts.values(), {"counts": counts})})
            kinds = np.array([each["kinds"] for each in again])
        require_same_kinds(kinds)
        counting = {fragment for fragment, each in enumerate(weights) if each.any()}
        if underway is not None:
            counting.add(underway.fragment)
        averaged.met(now, finite=finite, average=not counting.isdisjoint(due))
        kept = self._alpha if finite and not settles else 0.0
        for fragment in range(self._fragments):
            stepped = {number: each for number, each in enumerate(trained) if cut[number] == fragment}
            if fragment in parts and fragment in counting:
                weight = float(weights[fragment][self.workers.rank])
                arrived = underway if underway is not None and underway.fragment == fragment else None
                self._average_part(fragment, list(parts[fragment].values()), stepped, weight, kept, arrived)
            elif fragment in parts or not finite:  # A part that is not finite would spoil the others.
                begin_anew(stepped.values(), self._began)
        if 0 in counting and self.workers.host_group is not None:
            averaged.set_step_counts(counts, weights[0][self.workers.rank], self._largest_of)
        self.tracker.stopwatch.synchronised()
        now.synchronised_seconds = time.perf_counter() - now.paused
        if reported:
            self.tracker.meter.received = None  # Sizes were decided from these reports before.
        met = parts.keys() - ({underway.fragment} if underway is not None else ())
        self._units = [np.nan if part in met else units for part, units in enumerate(counted)]
        self._weighed, self._alike, self._apart = False, True, not settles and (self._fragments > 1 or self._alpha > 0)

    def _largest_of(self, own: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(own, dist.ReduceOp.MAX, group=self.workers.host_group)
        return own

    def _cut(self) -> tuple[list[torch.Tensor], list[int]]:
        """The parameters, and the fragment of each."""
        trained = self._averaged.parameters()
        return trained, cut_into_fragments([each.nbytes for each in trained], self._fragments)

    def _parts(self, named: Mapping[str, torch.Tensor], due: Iterable[int]) -> dict[int, dict[str, torch.Tensor]]:
        """The tensors of these fragments, by fragment and name."""
        # What no optimizer steps, buffers for one, is in the first.
        fragments = {each.data_ptr(): fragment for each, fragment in zip(*self._cut(), strict=True)}
        parts: dict[int, dict[str, torch.Tensor]] = {fragment: {} for fragment in due}
        for name, tensor in named.items():
            if (fragment := fragments.get(tensor.data_ptr(), 0)) in parts:
                parts[fragment][name] = tensor
        return parts

    @torch.no_grad()
    def _leave(self, fragment: int) -> None:
        """Begin the exchange of a fragment as it is now; the worker computes on while it is under way."""
        tensors = self._parts(self._averaged.tensors(), (fragment,))[fragment]
        units, self._units[fragment] = self._units[fragment], np.nan
        weight = float(np.nan_to_num(units)) if self._averaged.finite(tensors) else 0.0
        total, works = torch.tensor(weight, dtype=torch.float64), []
        sums = [(chunk, flat_of(chunk, weight)) for chunk in chunks([*tensors.values()])]
        if self.workers.device_group is not None:
            works = [dist.all_reduce(total, group=self.workers.host_group, async_op=True)]
            works += [dist.all_reduce(flat, group=self.workers.device_group, async_op=True) for _, flat in sums]
        self._underway = _Underway(fragment, units, total, sums, works)

    def _arrive(self, *, discard: bool) -> "_Underway | None":
        """Wait for the exchange that is under way, if there is one; None if its sums are of no use.

        Raises:
            RuntimeError: A collective failed.
        """
        underway, self._underway = self._underway, None
        if underway is not None:
            for work in underway.works:
                work.wait()
            if discard or not underway.total:
                self._units[underway.fragment] = float(np.nansum((self._units[underway.fragment], underway.units)))
                return None
        return underway

    @torch.no_grad()
    def _average_part(
        self,
        fragment: int,
        tensors: Sequence[torch.Tensor],
        stepped: Mapping[int, torch.Tensor],
        weight: float,
        kept: float,
        arrived: "_Underway | None",
    ) -> None:
        """Average these tensors, and step on the parameters among them, of which this worker keeps a part as it is.

        The averages are those that have `arrived`, if there are any.
        """
        own = [each.clone() for each in stepped.values()] if kept else []
        if arrived is not None:
            for chunk, flat in arrived.sums:
                split(flat.div_(arrived.total.to(flat.device)), chunk)
        elif self._sums is not None:
            if self._sums.narrows:
                tensors = self._average_changes(fragment, tensors, list(stepped.values()), weight, self._sums)
            average(tensors, weight, self._sums.add_up)
        self._averaged.step_outer(stepped, self._began)
        for parameter, mine in zip(stepped.values(), own, strict=False):
            self._began[parameter] = parameter.detach().clone()
            parameter.lerp_(mine, kept)

    def _average_changes(
        self,
        fragment: int,
        tensors: Sequence[torch.Tensor],
        stepped: Sequence[torch.Tensor],
        weight: float,
        sums: HierarchicalSum,
    ) -> list[torch.Tensor]:
        """Replace these parameters by where the mean of the workers' changes leads; returns the other tensors."""
        trained, began = (
            [torch.view_as_real(each) if each.is_complex() else each for each in those]
            for those in (stepped, [self._began.get(each, each) for each in stepped])
        )
        starts = iter(began)
        for number, chunk in enumerate(chunks(trained)):
            pairs = list(zip(chunk, starts, strict=False))
            flat = torch.cat([(now - start).reshape(-1).float() for now, start in pairs])
            sums.changes((fragment, number), flat.mul_(weight) if weight else flat.zero_())
            parts = torch.split(flat, [each.numel() for each in chunk])
            for (parameter, start), part in zip(pairs, parts, strict=True):
                parameter.copy_(start + part.view_as(start))
        places = {each.data_ptr() for each in trained}
        return [each for each in tensors if each.data_ptr() not in places]


@dataclass(frozen=True, slots=True)
class _Underway:
    """An exchange that goes on while the worker computes.

    Attributes:
        units: This worker's samples that it counts with.
        total: Of all workers, once the `works` are done.
        sums: Tensors, and the sum over all workers of their values when the exchange began, times the worker's units.
    """

    fragment: int
    units: float
    total: torch.Tensor
    sums: list[tuple[list[torch.Tensor], torch.Tensor]]
    works: list[dist.Work]
