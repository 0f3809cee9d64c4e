"""The engine of a replica that takes local steps: the members average their models, in periods that may not count."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, final

import torch

from evenstep.core.errors import ConfigError
from evenstep.core.fragments import due_fragments
from evenstep.schemes import Scheme
from evenstep.torch.elastic.engine import NO_BACKWARD, ElasticEngine
from evenstep.torch.elastic.quorum import BrokenQuorumError
from evenstep.torch.engines.averages import (
    Averaged,
    average,
    begin_anew,
    kinds_of,
    require_same_kinds,
    told,
    weights_in,
)
from evenstep.torch.engines.copies import CopiedGradients
from evenstep.torch.engines.engine import UNSETTLED, counted_units
from evenstep.worker.hand_outs import HandedOut, Origin


@final
class LocalReplica(ElasticEngine):
    """Steps alone for a period, in which the members stay the same; then they average their models, and it may count.

    If it does not, everything goes back to the last meeting, and those that are left take the same samples again.

    Args:
        common: The arguments of `ElasticEngine`.
        parts: Returns what has a state that goes back, besides the models.
    """

    def __init__(
        self,
        *common: Any,
        scheme: Scheme,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        parts: Callable[[], Sequence[Any]],
    ) -> None:
        super().__init__(*common, scheme=scheme)
        self._models, self._parts = models, parts
        self._averaged = Averaged(scheme, models, optimizers, self.tracker)
        self._copies = CopiedGradients(models)
        self._began: _State | None = None
        """The state at the last meeting, from the first batch after it on."""
        self._last: HandedOut | None = None
        """The last batch of the period that has ended."""
        self._units, self._weighed = 0.0, False

    @property
    def underway(self) -> bool:
        return self._began is not None

    def begin_loop(self, loader: Origin) -> None:
        """Begin a loop; one that was left within a period has ended this."""
        super().begin_loop(loader)
        self.settle()

    def begin(self, batch: HandedOut) -> None:
        self._began = self._began or _State(self._models, self._parts())
        self._ended, self.uncounted = False, 0
        self.tracker.batch_begins()
        self.tracker.begin(batch.share, batch.piece, batch.epoch, batch.origin.number)

    def weigh(self, batch: HandedOut) -> None:
        self._weighed = True

    def steps(self, optimizer: torch.optim.Optimizer) -> bool:
        self._step_alone(optimizer, ended=self._ended)
        return True

    def _end_batch(self) -> None:
        batch = self.hand_outs.in_hand
        if batch is None or self._ended or (batch.closed and not batch.passed):
            return
        if not batch.computed:
            raise ConfigError(NO_BACKWARD)
        self._last, self._ended = batch, True
        self._units += counted_units((batch,))
        self.tracker.batch_ends()
        if batch.piece.last and (self._quorum.broken or due_fragments(batch.piece, self._iterations)):
            self._meet(batch)

    @property
    def unsettled(self) -> str | None:
        return UNSETTLED if self.underway else None

    def settle(self) -> None:
        """End the period now. All members must call it together."""
        batch = self.hand_outs.in_hand
        if batch is not None and batch.computed:
            self._end_batch()
        if self._last is not None:
            self._meet(self._last)

    def _meet(self, last: HandedOut) -> None:
        """End the period after this batch: average the models and step along the change, or go back."""
        began, tracker = self._began, self.tracker
        now = tracker.iteration
        assert began is not None
        assert now is not None
        tracker.stopwatch.pause()
        now.paused = tracker.clock()
        with self.meeting(tracker.waiting()):
            try:
                averaged = self._average(began)
            except BrokenQuorumError:
                averaged = False
            counts = self._commit(last)
        if not counts:
            began.restore()
        elif averaged:
            self._averaged.step_outer(dict(enumerate(self._averaged.parameters())), began.tensors)
        now.synchronised_seconds = tracker.clock() - now.paused
        self._began = self._last = None
        self._units, self._weighed = 0.0, False

    @torch.no_grad()
    def _average(self, began: "_State") -> bool:
        """Average the tensors of the members, if any of them may count; all report how they computed.

        Raises:
            BrokenQuorumError: A member was lost.
            DisagreementError: The members computed different iterations, or stepped different parameters.
            DivergedError: See `NonfiniteGuard.skip`.
        """
        now, averaged = self.tracker.iteration, self._averaged
        assert now is not None
        named, counts = averaged.tensors(), averaged.step_counts()
        finite = averaged.finite(named)
        extra = told(kinds_of(named, {"counts": counts}), [self._units if finite else float("nan")])
        row = self._rows.row(now, weighed=self._weighed, extra=extra)
        kinds, (weights,) = weights_in(self._rows.check(self._quorum.rows(torch.tensor(row)).numpy()))
        require_same_kinds(kinds)
        weight = float(weights[self.workers.rank])
        averaged.met(now, finite=finite, average=bool(weights.any()))
        if not weights.any():
            begin_anew(averaged.parameters(), began.tensors)
            return False
        average([*named.values()], weight, lambda flat: self._quorum.sum(flat)())
        averaged.set_step_counts(counts, weight, lambda own: self._quorum.rows(own).amax(0))
        return True


@final
class _State:
    """The state of these models and other parts, as it is now.

    Attributes:
        tensors: A copy of each parameter and buffer of the models.
    """

    def __init__(self, models: Sequence[torch.nn.Module], parts: Sequence[Any]) -> None:
        tensors = (each for model in models for each in (*model.parameters(), *model.buffers()))
        self.tensors = {each: each.detach().clone() for each in tensors}
        self._parts = [(each, deepcopy(each.state_dict())) for each in parts]

    @torch.no_grad()
    def restore(self) -> None:
        """Set all to this state."""
        for each, before in self.tensors.items():
            each.copy_(before)
        for part, state in self._parts:
            part.load_state_dict(state)
