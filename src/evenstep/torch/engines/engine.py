"""What the loader, the model and the optimizer need of an engine: the part of a worker that communicates."""

import threading
import time
import warnings
from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from evenstep.core.errors import ConfigError, EvenstepError
from evenstep.core.samples import EpochCosts, Ledger, Shares
from evenstep.torch.engines.traces import Inputs, tensors_of
from evenstep.torch.processes.liveness import Liveness, explained
from evenstep.torch.processes.workers import Workers
from evenstep.worker.hand_outs import HandedOut, HandOuts, Origin
from evenstep.worker.iteration import units_of
from evenstep.worker.tracker import Tracker

if TYPE_CHECKING:
    from evenstep.torch.engines.loss_scale import LossScale

NO_BATCH: Final = (
    "the optimizer was stepped before the prepared loader had handed out a batch, and another loader gives every worker"
    " the same samples: loop over the loader that prepare returned"
)


class Engine(ABC):
    """Keeps one worker in step with the others.

    The loader calls `enter_loader` and `hand_out` around each batch, the model `forward_begins` and `forward_ends`, and
    the optimizer `before_step`. A batch that is fetched ahead begins with its first forward pass. A failed collective
    in backward cannot raise a typed error there, so the error is kept until the next `before_step` or `enter_loader`.
    No weight changes after a failure.

    Methods that wait for other workers raise a WorkerLostError if a worker died or stopped, and a DisagreementError if
    workers did different things.
    """

    def __init__(self, workers: Workers, balancer: Tracker, liveness: Liveness | None = None) -> None:
        self.workers = workers
        self.balancer = balancer
        self.hand_outs = HandOuts()
        self._liveness = liveness
        self._loop_over = False
        self._all_done = False
        self._one_at_a_time = ""
        """What in the scheme rules out two loops at the same time, if anything does."""
        self._looped: Origin | None = None
        """The loader of the loop that began last, if it has not ended."""
        self._loops_in: int | None = None
        """The thread of that loop."""
        self._mixed = False
        self._stepped_outside: set[int] | None = None
        """The optimizers that stepped since the script left a loop before its end; None inside a loop."""
        self._strayed = False
        """Whether a forward pass was of no batch that the loader handed out."""
        self._scale: LossScale | None = None
        """Looks at how the loss is scaled, where gradients are summed and it is not sure yet."""
        self._units_ahead: tuple[HandedOut | None, Any] | None = None
        """What `weigh_by` counted in the batch of the next forward pass, and which that is expected to be."""

    def begin_loop(self, loader: Origin) -> None:
        """A loop over this loader begins.

        Raises:
            ConfigError: It must not, inside a loop over another loader.
        """
        if self._one_at_a_time and self._looped is not None and self._looped is not loader:
            raise ConfigError(
                f"a loop over a loader began inside a loop over another, and {self._one_at_a_time} goes with one at a"
                " time: finish or leave the first loop before, or use a scheme without it"
            )
        self._looped, self._loops_in = loader, threading.get_ident()

    @abstractmethod
    def enter_loader(self) -> None:
        """The script asks for the next batch; it may not have computed the last one."""

    def shares(self, ledger: Ledger, *, epoch: int, depth: int, costs: EpochCosts | None = None) -> Shares:
        """This worker's shares of an epoch that starts at the ledger's position; by `costs` if samples differ."""
        return self.balancer.shares(ledger, epoch=epoch, depth=depth, costs=costs)

    def hand_out(self, batch: HandedOut) -> None:
        """A batch is handed out. It begins now if the one before is finished."""
        self._loop_over = self._all_done = False
        self._stepped_outside = None
        if self.hand_outs.put(batch):
            self.begin(batch)
            return
        now = self.hand_outs.in_hand
        self.balancer.fetched_ahead(ended=now is None or now.finished)

    @abstractmethod
    def begin(self, batch: HandedOut) -> None:
        """The compute of this batch begins."""

    def _continue_with(self, batch: HandedOut) -> None:
        """The script has gone on to a batch that was fetched ahead."""
        self.batch_ends()
        self.hand_outs.skip_to(batch)
        if self._stepped_outside is not None:
            self._stepped_outside.clear()
        self.begin(batch)

    @abstractmethod
    def batch_ends(self) -> None:
        """The batch in hand is over, and the next one was fetched already."""

    def computes(self, batch: Any) -> None:
        """The script computes this batch, as it was handed out, from now on.

        Raises:
            ConfigError: It is none of those that were handed out and not computed.
        """
        told = self.hand_outs.tell(batch)
        if told is None:
            raise ConfigError("computes takes a batch as the loader handed it out, before its first forward pass")
        if told is not self.hand_outs.in_hand:
            self._continue_with(told)

    def weigh_by(self, count: float, loader: Origin) -> None:
        """Weigh this worker's batch of that loader by `count` over the total of all workers, instead of by samples.

        Raises:
            ConfigError: The count is negative or no number, no batch of the loader is in hand, or the scheme does not
                support it.
        """
        between, now = self.hand_outs.between, self.hand_outs.in_hand
        due = self.hand_outs.due if between else now
        if due is not None and due.origin is not loader:
            raise ConfigError(
                "weigh_by was called on a loader whose batch is not computed now: call it between the forward pass of"
                " the loader's batch and its backward"
            )
        units = self.units_of_all(units_of(None if due is None else due.share, count))
        if between:
            self._units_ahead = due, units
        elif now is not None:
            now.units = units
            self.weigh(now)

    def units_of_all(self, units: float) -> Any:
        """This worker's units in the form in which `HandedOut` keeps them until its weight is set."""
        return units

    @abstractmethod
    def weigh(self, batch: HandedOut) -> None:
        """The batch in hand has units."""

    def end_loop(self) -> None:
        """All batches of the epoch were handed out; some may not be computed yet."""
        self.hand_outs.ask()
        self._loop_over, self._all_done = True, self.hand_outs.done

    def leave_loop(self) -> None:
        """The script has left the epoch, at its end or before."""
        self._looped = None
        self._stepped_outside = None if self._loop_over else set()
        self.balancer.leave_loop()

    @property
    def synchronises(self) -> bool:
        """Whether the optimizer steps on the batch in hand, which may be one of several micro-batches."""
        return True

    @property
    def unsettled(self) -> str | None:
        """Why a checkpoint of one worker would not serve all workers now; None if it does."""
        return None

    def settle(self) -> None:
        """Make the weights of all workers equal, if the scheme lets them differ between steps."""
        return

    def forward_begins(self, model: int, inputs: Any) -> HandedOut | None:
        """The model of that index begins a forward pass; returns the batch that it is of, if there is one.

        Raises:
            ConfigError: Several batches were fetched ahead, and which of them it is of cannot be known.
        """
        given = Inputs(inputs)
        self._require_one_thread()
        if self._loop_over:
            over = self._all_done or self.hand_outs.beyond(model, given)
            self._all_done = over and not self.hand_outs.kept(given)
        batch = self.hand_outs.in_hand if self._all_done else self.hand_outs.of_forward(model, given)
        if batch is not None and batch is not self.hand_outs.in_hand:
            self._continue_with(batch)
        if batch is not None:
            self._take_units(batch)
            batch.passed[model] = batch.passed.get(model, 0) + 1
            batch.origin.computed = True
            if self._scale is not None and self._scale.looks:
                self._scale.forward_begins(given)
        self._strayed |= batch is None
        return batch

    def _require_one_thread(self) -> None:
        if self._loops_in not in (None, threading.get_ident()):
            raise ConfigError(
                "the prepared loader is looped over in another thread than the one that calls the model, as by a"
                " prefetcher with a thread, and both would communicate at the same time: loop over it in the same"
                " thread (num_workers fetches samples ahead)"
            )

    def _take_units(self, batch: HandedOut) -> None:
        if self._units_ahead is None:
            return
        (due, batch.units), self._units_ahead = self._units_ahead, None
        if due is not batch:
            raise ConfigError(
                "weigh_by was called with several batches fetched ahead, and not for the one that was computed next:"
                " call it between the forward pass of a batch and its backward"
            )
        self.weigh(batch)

    def reduction_begins(self, model: int, *, synchronises: bool) -> None:
        """The forward pass of this model begins; `synchronises`: its backward sums gradients over workers."""
        self.balancer.stopwatch.run()

    def forward_ends(self, model: int, batch: HandedOut | None, outputs: Any) -> None:
        """The forward pass of this model is over. Its backward is noticed at its outputs."""
        if batch is None:
            return
        watched = [each for each in tensors_of(outputs) if each.requires_grad]
        batch.open = bool(watched)
        for each in watched:
            each.register_hook(partial(self._backward_begins, model, batch))  # type: ignore[no-untyped-call]

    def loss_begins(self) -> None:
        """The forward pass of the script's own DistributedDataParallel, which may communicate, is over."""
        if self._scale is not None and self._scale.looks:
            self._scale.loss_begins()

    def _backward_begins(self, model: int, batch: HandedOut, _: torch.Tensor | None) -> None:
        batch.open, batch.backward = False, True
        now = self.hand_outs.in_hand
        self._mixed |= now is not None and not batch.weighs_as(now)

    def check_batch(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that this step is of the batch in hand, as `require_handed_out` and `require_unmixed`."""
        if self._strayed:
            self.require_handed_out()
        if self._mixed:
            self.require_unmixed()
        if self._stepped_outside is None or self.workers.count == 1:
            return
        if id(optimizer) in self._stepped_outside:
            warnings.warn(
                "the optimizer steps more than once after a loop over the prepared loader was left. Batches of another"
                " loader are the same samples on every worker: loop over the loader that prepare returned",
                stacklevel=2,
            )
        self._stepped_outside.add(id(optimizer))

    def require_handed_out(self) -> None:
        """Check that the script loops over the prepared loader.

        Raises:
            ConfigError: It has not handed out any batch, and the model was trained on something else.
        """
        if self.workers.count > 1 and self.hand_outs.in_hand is None and self._strayed:
            raise ConfigError(NO_BATCH)

    @property
    def looping(self) -> bool:
        """Whether the script is in a loop over a prepared loader."""
        return self._looped is not None

    def require_summed(self) -> None:
        """Check that the gradients of the batch in hand, if it has any, are summed over the workers.

        Raises:
            ConfigError: They are not.
        """
        return  # Only engines that sum in backward can tell.

    def require_unmixed(self) -> None:
        """Check that no backward was weighed as that of another batch.

        Raises:
            ConfigError: One was.
        """
        if self._mixed:
            raise ConfigError(
                "the backward of a batch came after the next batch had begun, and the two have different weights: run"
                " the backward of a batch before the forward pass of the next"
            )

    @abstractmethod
    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before any weight changes, by a step of one of the script's optimizers.

        Raises:
            ConfigError: The optimizer must not step now, or not on these gradients.
        """

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after a step of one of the script's optimizers."""
        return

    def explained(self, cause: Exception) -> EvenstepError:
        """The error to raise after a collective failed with `cause`; it names the missing worker."""
        return explained(cause, self._liveness, time.sleep)

    def close(self) -> None:
        """Stop the pulse and the recording, and leave the process groups of this run."""
        self.balancer.close()
        if self._liveness is not None:
            self._liveness.close()
        self.workers.leave()
