"""The interface of engines, which do a worker's communication, to the loader, the model and the optimizer."""

import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from evenstep.core.activity import Doing
from evenstep.core.errors import ConfigError, EvenstepError
from evenstep.core.samples import Share, Shares, Window
from evenstep.torch.engines.traces import Inputs, tensors_of
from evenstep.torch.processes.liveness import Liveness, explained
from evenstep.torch.processes.workers import Workers
from evenstep.worker.hand_outs import HandedOut, HandOuts, Origin
from evenstep.worker.iteration import units_of
from evenstep.worker.tracker import Tracker

if TYPE_CHECKING:
    from pathlib import Path

    from evenstep.torch.data.own_data import OwnData
    from evenstep.torch.engines.copies import CopiedGradients
    from evenstep.torch.engines.loss_scale import LossScale

NO_BATCH: Final = (
    "the optimizer was stepped before the prepared loader had handed out a batch, and another loader gives every worker"
    " the same samples: loop over the loader that prepare returned"
)
UNSETTLED: Final = "each worker's weights are its own until the next average: call loader.settle() on all before saving"


class Engine(ABC):
    """Keeps one worker in step with the others.

    The loader calls `enter_loader` and `hand_out` around each batch, the model `forward_begins` and `forward_ends`, and
    the optimizer `before_step`. A batch that is fetched ahead begins with its first forward pass. A failed collective
    in backward cannot raise a typed error there, so the error is kept until the next `before_step` or `enter_loader`.
    No weight changes after a failure.

    Methods that wait for other workers raise a WorkerLostError if a worker died or stopped, and a DisagreementError if
    workers did different things.
    """

    def __init__(self, workers: Workers, tracker: Tracker, liveness: Liveness | None = None) -> None:
        self.workers = workers
        self.tracker = tracker
        self.hand_outs = HandOuts()
        self.shares: Callable[..., Shares] = tracker.shares
        """Plans this worker's shares of an epoch. Servers and `evenstep plan` put another plan in its place."""
        self.checkpoints: dict[Path, Any] = {}
        """State of `evenstep.checkpoint` per folder, kept until the run ends."""
        self.liveness = liveness
        self._loop_over = False
        self._all_done = False
        self.uncounted = 0
        """The iterations handed out last that do not count, as a member was lost in their step; they come again."""
        self.replaces_weights = False
        """Whether weights that another optimizer than the prepared one changes are lost, as servers have theirs."""
        self.accumulates = False
        """Whether an iteration may consist of several micro-batches."""
        self.window = Window()
        """The places in them where the optimizer steps."""
        self.together = False
        """Whether a framework says that all workers come to this place equally often, between micro-batches too."""
        self._one_at_a_time = ""
        """The feature of the scheme that rules out two loops at the same time, if any."""
        self.origins: list[Origin] = []
        """The loaders that were looped over."""
        self.looped: Origin | None = None
        """The loader of the last loop, if that has not ended."""
        self._loops_in: int | None = None
        """The thread of that loop, until a forward pass has shown that it calls the model too."""
        self._mixed = False
        self._stepped_outside: set[int] | None = None
        """The optimizers that stepped since the script left a loop before its end; None inside a loop."""
        self._left_open: HandedOut | None = None
        """The last batch of a period that ended, with the next forward pass, before its backward: it may be skipped."""
        self._strayed = False
        """Whether a forward pass computed no batch of the loader."""
        self.own: OwnData | None = None
        """The data of the last loop over a loader of this worker's own, of which its reports tell."""
        self._weight_of: Callable[[Share], float] | None = None
        """Returns the weight of the gradient of a share, if that is known at its hand-out."""
        self._part_weight: float | None = None
        """The factor of the weight of a part of it, besides its portion; None if each part weighs like the share."""
        self._scale: LossScale | None = None
        """Finds out how the loss is scaled, where gradients are summed, until it is sure."""
        self._fetches_ahead: bool | None = None
        """Whether the script fetches batches before it has stepped on the last one; None before the first step."""
        self._copies: CopiedGradients | None = None
        """Keeps the gradients of a backward on a copy of another worker's sample out, where no weight of 0 does."""
        self._units_ahead: tuple[HandedOut | None, Any] | None = None
        """The count from `weigh_by` for the next forward pass, and the batch that it is expected to compute."""

    def begin_loop(self, loader: Origin) -> None:
        """Begin a loop over this loader.

        Raises:
            ConfigError: It is inside a loop over another loader, where it must not be.
        """
        if self._one_at_a_time and self.looped is not None and self.looped is not loader:
            raise ConfigError(
                f"a loop over a loader began inside a loop over another, and {self._one_at_a_time} goes with one at a"
                " time: finish or leave the first loop before, or use a scheme without it"
            )
        self.looped, self._loops_in = loader, threading.get_ident()
        if loader not in self.origins:
            self.origins.append(loader)

    @abstractmethod
    def enter_loader(self) -> None:
        """Called when the script asks for the next batch; it may not have computed the last one."""

    def hand_out(self, batch: HandedOut) -> None:
        """Note that a batch is handed out. It begins now if the one before is finished."""
        if self._weight_of is not None:
            batch.weight = self._weight_of(batch.share)
            if self._part_weight is not None:
                batch.weight = batch.weight * batch.piece.portion * self._part_weight
        self._loop_over = self._all_done = False
        self._stepped_outside = None
        if self.hand_outs.put(batch):
            self.begin(batch)
            return
        now = self.hand_outs.in_hand
        self.tracker.fetched_ahead(ended=now is None or now.finished)

    @abstractmethod
    def begin(self, batch: HandedOut) -> None:
        """Begin the compute of this batch."""

    def _continue_with(self, batch: HandedOut) -> None:
        """Move on to a batch that was fetched ahead, as the script has."""
        self.batch_ends()
        self.hand_outs.skip_to(batch)
        if self._stepped_outside is not None:
            self._stepped_outside.clear()
        self.begin(batch)

    @abstractmethod
    def batch_ends(self) -> None:
        """End the current batch, when the next one was fetched already."""

    def computes(self, batch: Any) -> None:
        """Note that the script computes this batch, as it was handed out, from now on.

        Raises:
            ConfigError: It is not one of those that were handed out and not yet computed.
        """
        told = self.hand_outs.tell(batch)
        if told is None:
            raise ConfigError("computes takes a batch as the loader handed it out, before its first forward pass")
        if told is not self.hand_outs.in_hand:
            self._continue_with(told)

    def weigh_by(self, count: float, loader: Origin) -> None:
        """Weigh this worker's batch of that loader by `count` over the total of all workers, instead of by samples.

        Raises:
            ConfigError: The count is negative or not a number, the loader has no current batch, or the scheme does not
                support it.
        """
        between, now = self.hand_outs.between, self.hand_outs.in_hand
        due = self.hand_outs.due if between else now
        if due is not None and due.origin is not loader:
            raise ConfigError(
                "weigh_by was called on a loader whose batch is not computed now: call it between the forward pass of"
                " the loader's batch and its backward"
            )
        units = self.units_of_all(units_of(None if due is None else due.piece, count))
        if between:
            self._units_ahead = due, units
        elif now is not None:
            now.units = units
            self.weigh(now)

    def units_of_all(self, units: float) -> Any:
        """Return this worker's units in the form that `HandedOut` keeps until its weight is set."""
        return units

    def weigh(self, batch: HandedOut) -> None:
        """Called when the current batch has units, for engines that do not only need them afterwards."""
        return

    def end_loop(self) -> None:
        """Called when all batches of the epoch were handed out; some may not be computed yet."""
        self.hand_outs.ask()
        self._loop_over, self._all_done = True, self.hand_outs.done

    def redivided(self) -> Share | None:
        """Return this worker's share of the present slice if that was divided anew since the last batch; else None."""
        return None

    def leave_loop(self) -> None:
        """Called when the script has left the epoch, at its end or before."""
        self.looped = None
        self._stepped_outside = None if self._loop_over else set()
        self.tracker.leave_loop()

    @property
    def synchronises(self) -> bool:
        """True after the last of the micro-batches, if there are several in an iteration."""
        return self.tracker.iteration is None or self.tracker.iteration.piece.last

    @property
    def unsettled(self) -> str | None:
        """The reason why one worker's checkpoint would not serve all workers now; None if it would."""
        return None

    def settle(self) -> None:
        """Make the weights of all workers equal, if the scheme lets them differ between steps."""
        return

    def start_over(self) -> None:
        """Called when a state was loaded: what workers have computed since they last met does not count."""
        return

    def compare_replicas(self) -> None:
        """Check, on all workers together, that they have the same weights, if the scheme promises that.

        Raises:
            DisagreementError: They do not.
        """
        return

    def forward_begins(self, model: int, inputs: Any) -> HandedOut | None:
        """Called when the model of that index begins a forward pass; returns the batch that it computes, if any.

        Raises:
            ConfigError: Several batches were fetched ahead, and it is not known which of them it computes.
        """
        if self._loops_in is not None:
            self._require_one_thread()
        if self._loop_over:
            given = Inputs(inputs)
            over = self._all_done or self.hand_outs.beyond(model, given)
            self._all_done = over and not self.hand_outs.kept(given)
        batch = self.hand_outs.in_hand if self._all_done else self.hand_outs.of_forward(model, partial(Inputs, inputs))
        if batch is None:
            self._strayed = True
            return None
        if batch is not self.hand_outs.in_hand:
            self._continue_with(batch)
        if self._units_ahead is not None:
            self._take_units(batch, *self._units_ahead)
        batch.passed[model] = batch.passed.get(model, 0) + 1
        batch.origin.computed = True
        if self._scale is not None and self._scale.looks:
            self._scale.forward_begins(Inputs(inputs))
        return batch

    def _require_one_thread(self) -> None:
        if self._loops_in != threading.get_ident():
            raise ConfigError(
                "the prepared loader is looped over in another thread than the one that calls the model, as by a"
                " prefetcher with a thread, and both would communicate at the same time: loop over it in the same"
                " thread (num_workers fetches samples ahead)"
            )
        self._loops_in = None

    def _take_units(self, batch: HandedOut, due: HandedOut | None, units: Any) -> None:
        batch.units, self._units_ahead = units, None
        if due is not batch:
            raise ConfigError(
                "weigh_by was called with several batches fetched ahead, and not for the one that was computed next:"
                " call it between the forward pass of a batch and its backward"
            )
        self.weigh(batch)

    def reduction_begins(self, model: int, *, synchronises: bool) -> None:
        """Called when this model's forward pass begins; `synchronises`: its backward sums gradients over workers."""
        self.tracker.stopwatch.run()

    def forward_ends(self, model: int, batch: HandedOut | None, outputs: Any, *, communicates: bool = False) -> None:
        """Called when this model's forward pass is over. Its backward is noticed at its outputs.

        `communicates`: it was of the script's own DistributedDataParallel, which may have communicated.
        """
        if communicates and self._scale is not None:
            self.loss_begins()
        if batch is None:
            return
        batch.open = False
        for each in (outputs,) if isinstance(outputs, torch.Tensor) else tensors_of(outputs):
            if each.requires_grad:
                batch.open = True
                each.register_hook(partial(self._backward_begins, model, batch))  # type: ignore[no-untyped-call]

    def loss_begins(self) -> None:
        """Note that communication up to here was not that of the script's loss, but of a framework."""
        if self._scale is not None and self._scale.looks:
            self._scale.loss_begins()

    def _backward_begins(self, model: int, batch: HandedOut, _: torch.Tensor | None) -> None:
        if batch is self._left_open:
            raise ConfigError(
                "the backward of the last batch of a period came after the forward pass of the next batch, with which"
                " the period had ended: run the backward of a batch before the forward pass of the next"
            )
        batch.open, batch.backward = False, True
        if self._copies is not None and not batch.piece.samples:
            self._copies.keep_out()
        now = self.hand_outs.in_hand
        if now is not batch and now is not None:
            self._mixed |= not batch.weighs_as(now)

    def check_batch(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Check that this step, by the optimizer if one is given, belongs to the current batch.

        Raises:
            ConfigError: The loader has not handed out any batch, and the model was trained on something else; or a
                backward was weighed as the backward of another batch.
        """
        if self._strayed and self.workers.count > 1 and self.hand_outs.in_hand is None:
            raise ConfigError(NO_BATCH)
        if self._mixed:
            raise ConfigError(
                "the backward of a batch came after the next batch had begun, and the two have different weights: run"
                " the backward of a batch before the forward pass of the next"
            )
        if optimizer is None or self._stepped_outside is None or self.workers.count == 1:
            return
        if id(optimizer) in self._stepped_outside:
            warnings.warn(
                "the optimizer steps more than once after a loop over the prepared loader was left. Batches of another"
                " loader are the same samples on every worker: loop over the loader that prepare returned",
                stacklevel=2,
            )
        self._stepped_outside.add(id(optimizer))

    def require_summed(self) -> None:
        """Check that the gradients of the current batch, if it has any, are summed over the workers.

        Raises:
            ConfigError: They are not summed.
        """
        return  # Only engines that sum in backward can tell.

    @abstractmethod
    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called by a step of one of the script's optimizers, before any weight changes.

        Raises:
            ConfigError: The optimizer must not step now, or not on these gradients.
        """

    def _step_alone(self, optimizer: torch.optim.Optimizer, *, ended: bool = False) -> None:
        """Note a step on this worker's own gradients, those of the current batch unless that has `ended`."""
        self.check_batch(optimizer)
        self.tracker.mark(Doing.STEPPED)
        if (batch := self.hand_outs.in_hand) is not None:
            batch.closed = True
            self._fetches_ahead = bool(self._fetches_ahead or self.hand_outs.ahead)
            if self._copies is not None and not ended:
                self._copies.step_begins(batch)

    def explained(self, cause: Exception) -> EvenstepError:
        """The error to raise after a collective failed with `cause`; it names the missing worker."""
        return explained(cause, self.liveness)

    def require_common_place(self) -> None:
        """Check that all workers pass through this place of the script equally often.

        Raises:
            ConfigError: It is between two micro-batches, of which workers have unlike numbers.
        """
        now = self.hand_outs.in_hand
        if not (self.synchronises or self.together) and not (now is not None and now.piece.first and not now.passed):
            raise ConfigError(
                "workers meet here between two batches of a step, of which each has its own number: gather and average"
                " over workers where loader.synchronises (in Accelerate, accelerator.sync_gradients) is True, or, in a"
                " Trainer, set whole_batches=False"
            )

    @contextmanager
    def meeting(self, seen: AbstractContextManager[None] | None = None) -> Iterator[None]:
        """Inside, the worker waits for the others and does not compute; they see it waiting, or as in `seen`.

        Raises:
            ConfigError: Workers cannot meet between two micro-batches, of which they have unlike numbers.
            EvenstepError: A collective failed; it names the missing worker.
        """
        self.require_common_place()
        with self.waiting(seen or self.tracker.activity.waiting()):
            yield

    @contextmanager
    def waiting(self, seen: AbstractContextManager[None]) -> Iterator[None]:
        """The same at a place that evenstep chose, between micro-batches too.

        Raises:
            EvenstepError: A collective failed; it names the missing worker.
        """
        try:
            with self.tracker.interrupted(), seen:
                yield
        except RuntimeError as error:
            raise self.explained(error) from error

    def close(self) -> None:
        """Stop the pulse and the recording, and leave the process groups of this run.

        Raises:
            CheckpointError: A checkpoint that was being written could not be finished.
        """
        with ExitStack() as ending:
            ending.callback(self.workers.leave)
            if self.liveness is not None:
                ending.callback(self.liveness.close)
            ending.callback(self.tracker.close)
            for each in self.checkpoints.values():
                ending.callback(each.close)


def counted_units(batches: Iterable[HandedOut]) -> float:
    """Return the units of these batches: their samples, or what the script has counted."""
    return sum(each.piece.samples if each.units is None else each.units for each in batches)
