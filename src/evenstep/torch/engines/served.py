"""The server engine: each step pushes gradients to the parameter servers and pulls the current weights."""

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import torch

from evenstep.core.activity import Doing
from evenstep.core.errors import ConfigError
from evenstep.core.samples import EpochCosts, Ledger, Shares
from evenstep.protocol.layout import ShardLayout
from evenstep.schemes import Served
from evenstep.torch.engines.describe import OptimizerState
from evenstep.torch.engines.engine import Engine, counted_units
from evenstep.torch.engines.gradient_watch import ChangeWatch
from evenstep.torch.engines.served_parameters import ServedParameters
from evenstep.torch.processes.workers import Workers
from evenstep.worker.hand_outs import HandedOut
from evenstep.worker.iteration import Iteration
from evenstep.worker.nonfinite import NonfiniteGuard
from evenstep.worker.servers.exchange import Batch, OptimizerSide, ServedExchange
from evenstep.worker.servers.link import ServerLink
from evenstep.worker.tracker import Tracker

_FETCHED_IN_STEP: Final = (
    "a batch was fetched before the last one was stepped on, and workers that share every slice on parameter servers"
    " cannot claim ahead: fetch each batch after the step on the one before, or leave out engine=server"
)
_DONE_WITH: Final = (
    "the optimizer was stepped on a batch whose samples are done with, because its loop was left or the next one has"
    " begun: on parameter servers, step on the batches of an epoch before the next epoch's first batch is fetched"
)
_LOADER: Final = 2**32
"""The offset of epoch numbers per loader; a loader has fewer epochs."""


class ServedEngine(Engine):
    """Computes on claims, and exchanges gradients for weights with the servers.

    Args:
        link: The link to the servers, which this worker has joined.
        served: The scheme's options for servers.
        layouts: Which parameters each shard holds.
        parameters: The model's parameters by name.
        optimizer: The user's optimizer.
        state: The worker's side of the optimizer that the servers run.
        ahead: How many claims to hold besides those that were handed out, for data workers to fetch.
        in_step: Whether the workers share each slice, so that none can claim more than its part of the current one.
        local: Whether the script's optimizer steps here between two pushes.
    """

    def __init__(
        self,
        workers: Workers,
        tracker: Tracker,
        link: ServerLink,
        *,
        served: Served,
        layouts: Sequence[ShardLayout],
        parameters: dict[str, torch.nn.Parameter],
        optimizer: torch.optim.Optimizer,
        state: OptimizerState | OptimizerSide,
        ahead: int,
        in_step: bool,
        local: bool = False,
    ) -> None:
        super().__init__(workers, tracker)
        self._link = link
        self._overlaps = served.exchange == "overlapped"
        self._optimizer = optimizer
        self._parameters = ServedParameters(
            parameters, layouts, link, waits=not self._overlaps, local=local, wire=served.wire
        )
        self._changes = ChangeWatch(list(parameters.values()))
        self._warned = served.clip is not None
        self._state = state
        self._in_step = in_step
        self._counted: list[HandedOut] = []
        """The batches whose gradients the next push holds, as far as they are computed."""
        self._begun: HandedOut | None = None
        """The batch that began last."""
        self._claimed: Batch | None = None
        """The claim that was handed out last, perhaps in several batches."""
        self._forfeits = False
        """Whether gradients of samples that other workers now have may still be left."""
        self._computes = False
        """Whether the script has called the prepared model."""
        self._pass = ServedExchange(
            link,
            tracker,
            self._parameters,
            self._state,
            nonfinite=NonfiniteGuard(served.nonfinite, tracker, "change" if local else "gradient"),
            overlaps=self._overlaps and not local,
            ahead=ahead,
            rejoins=not in_step,
            before_weights=self._parameters.drop_changes,
            restarted=self._forfeit,
            keeps=lambda: self._fetches_ahead is not False,
            computes=lambda: self.hand_outs.in_hand is not None and self.hand_outs.in_hand.open,
        )
        self._one_at_a_time = "training on servers"
        self.replaces_weights = True
        self.shares = self._claims

    # The loader's side.

    def _claims(self, ledger: Ledger, *, epoch: int, depth: int, costs: EpochCosts | None = None) -> Shares:
        # The servers compare the epochs of all workers, and so their loaders.
        number = epoch + (self.looped.number * _LOADER if self.looped else 0)
        return self._pass.start(number, length=ledger.length, costs=costs)

    def enter_loader(self) -> None:
        if self._in_step:
            self._give_up()
        now = self.hand_outs.in_hand
        self.tracker.enter_loader(ended=self._in_step or now is None or now.closed)
        self._pass.record()

    def _give_up(self) -> None:
        """Drop the batches that were not pushed, where workers are in step; nothing of them is committed."""
        now = self.tracker.iteration
        for batch in tuple(self._pass.held):
            assert now is not None
            if now.paused is None:
                self.tracker.compute_ends()
            self._exchange(now, batch, ())

    def batch_ends(self) -> None:
        self.tracker.enter_loader()
        self._pass.record()

    def hand_out(self, batch: HandedOut) -> None:
        if batch.piece.first:
            self._claimed = self._pass.hand_out(batch.share.iteration, batch)
        batch.claimed = self._claimed
        super().hand_out(batch)

    def begin(self, batch: HandedOut) -> None:
        last, self._begun, now = self._begun, batch, self.tracker.iteration
        if last is not None and not last.computed and now is not None and now.paused is None:
            self.tracker.take_back()  # The script has skipped it.
        if self._forfeits and not self._counted and not self._pass.forfeited(batch.claimed):
            self._parameters.drop_gradients()
        if not self._pass.forfeited(batch.claimed):
            self._counted.append(batch)
        self._changes.changed()
        self.tracker.begin(batch.share, batch.piece, batch.epoch, batch.origin.number)

    def forward_begins(self, model: int, inputs: Any) -> HandedOut | None:
        batch = super().forward_begins(model, inputs)
        if batch is not None:
            self._computes = True
            self._pass.use_weights()
            batch.claimed.version = self._pass.version
            if self.hand_outs.ahead:
                self._fetches_ahead = True
        return batch

    def leave_loop(self) -> None:
        """Give back the samples that were claimed and not computed, unless the script may still compute them."""
        super().leave_loop()
        if self._pass.ended and self._pass.held:
            return
        if not self._pass.over:
            self._counted.clear()
        self._pass.leave()

    @property
    def unsettled(self) -> str | None:
        if self._pass.over:
            return None
        return (
            "in the middle of an epoch only the servers know which samples are done with, so this state repeats the"
            " epoch: save between epochs, or go on from the servers' snapshots with evenstep run --resume"
        )

    def close(self) -> None:
        self._pass.warn_of_held()
        self._changes.close()
        super().close()
        self._link.close()

    # The optimizer's side.

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        raise ConfigError(
            "the scheme trains on parameter servers, but your own optimizer was stepped: step the one that prepare"
            " returned"
        )

    def forget_gradients(self) -> None:
        """Drop the gradients of the computed batches from the next push."""
        self._counted = [each for each in self._counted if each is self.hand_outs.in_hand and not each.computed]

    def step(self) -> None:
        """Push the gradients of the batches that were computed since the last push, and pull.

        Raises:
            ConfigError: No batch was computed, or its samples are finished.
        """
        self.check_batch()
        stepped, in_hand = self._stepped_on(), self.hand_outs.in_hand
        if stepped is not None:
            if stepped is not in_hand:
                self.tracker.take_back()  # The current batch, which was fetched before this step.
            self._push(stepped)
        elif in_hand is not None and in_hand.passed and not in_hand.closed:
            self.tracker.compute_ends()
            in_hand.closed = True
        self.tracker.mark(Doing.STEPPED)
        if stepped is not None and in_hand is not None and stepped is not in_hand:
            self.batch_ends()
            self.begin(in_hand)
        if self._pass.ended and not self._pass.held:
            self.batch_ends()
            self._pass.end()

    def _stepped_on(self) -> HandedOut | None:
        """The newest batch that was computed and not pushed; None if other workers have its samples.

        Raises:
            ConfigError: There is no such batch.
        """
        now, held = self.hand_outs.in_hand, self._pass.held
        computed: HandedOut | None = next((each.of for each in reversed(held) if each.of.computed), None)
        if computed is None and now is not None and now.passed and now.claimed in held:
            computed = now  # Its backward did not go through the outputs.
        if computed is not None:
            if computed is not now or self.hand_outs.ahead:
                self._fetches_ahead = True
            elif self._fetches_ahead is None:
                self._fetches_ahead = False
            return computed
        if self._forfeits:
            return None
        if now is not None and now.passed and not now.closed:
            raise ConfigError(_FETCHED_IN_STEP if self._in_step else _DONE_WITH)
        if now is None or self._computes or held != [now.claimed]:
            raise ConfigError(
                "the optimizer was stepped without a current batch: step once for each batch of the loader"
            )
        return now  # The script has called its own model instead of the prepared one.

    def _push(self, stepped: HandedOut) -> None:
        now, batch = self.tracker.iteration, stepped.claimed
        assert now is not None
        self.tracker.compute_ends()
        if self._changes.changed() and not self._warned:
            self._warned = True
            warnings.warn(
                "the gradients were changed between backward and step: under parameter servers clip_grad_norm_ sees"
                " only this worker's part of the batch; have the servers clip with clip=... in the scheme",
                stacklevel=2,
            )
        if not self._overlaps:
            batch.version = self._pass.version
        counted = [each for each in self._counted if each.computed and each is not stepped]
        self._counted.clear()
        self._forfeits = False
        self._exchange(now, batch, [*counted, stepped])
        stepped.closed = True

    def fetch_state(self) -> dict[str, Any]:
        """The state dict of the script's optimizer, with the servers' state."""
        self._pass.settle()
        assert isinstance(self._state, OptimizerState)
        return self._pass.persist(self._state.fetch)

    def restore_state(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of the script's optimizer into it and into the servers."""
        self._pass.settle()
        self._optimizer.load_state_dict(state_dict)
        self._pass.persist(self._state.hand_over)
        self._state.clear()

    # In between.

    def _forfeit(self) -> None:
        """Drop this worker's gradients, because other workers have the samples that it has not pushed."""
        self._counted.clear()
        self._forfeits = True

    def _exchange(self, now: Iteration, batch: Batch, counted: Sequence[HandedOut]) -> None:
        """Push the gradients of the counted batches, or nothing. This finishes all batches up to `batch`."""
        samples = sum(each.piece.samples for each in counted)
        self._pass.push(now, batch, partial(self._put, samples), samples=samples, units=counted_units(counted))

    def _put(self, samples: int) -> float:
        self._parameters.drop_changes()
        return self._parameters.put_gradients() if samples else 0.0
