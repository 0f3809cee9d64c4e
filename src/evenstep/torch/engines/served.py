"""The server engine, on a worker: each step is a push to the parameter servers and a pull of what they have by then."""

import math
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast, final

import numpy as np
import torch

from evenstep.core.errors import ConfigError, EvenstepError, WorkerLostError
from evenstep.core.samples import Ledger, MicroBatch, Share, Shares
from evenstep.core.samples.claims import Claim
from evenstep.protocol.layout import ShardLayout
from evenstep.protocol.optimizer import OptimizerSpec, Options, options_to_record
from evenstep.schemes import Served
from evenstep.tensors.states import by_shard, decode_states, encode_states
from evenstep.torch.engines.describe import options_of, state_by_index, state_by_name
from evenstep.torch.engines.served_parameters import ServedParameters
from evenstep.torch.processes.workers import Workers
from evenstep.transport.base import Header
from evenstep.worker.balancer import Balancer
from evenstep.worker.iteration import Iteration, units_of
from evenstep.worker.servers.claimed import ClaimedShares
from evenstep.worker.servers.link import ExpiredError, Link

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from evenstep.core.values import IntArray

_Result = TypeVar("_Result")

MORE: Final = ("staleness", "behind", "share", "lead", "bound")
"""What the servers tell of a push that is written down with its iteration."""

_MAX_SKIPPED: Final = 100
"""Pushes in a row that a worker may leave out; a loss scale that is looked for takes fewer."""


@final
class NonfiniteGradientError(EvenstepError, FloatingPointError):
    """A gradient holds a NaN or an infinity, and the scheme refuses such."""


@final
class DivergedError(EvenstepError, FloatingPointError):
    """The training cannot go on: the weights, or gradients without end, hold a NaN or an infinity."""


@final
class ServedEngine:
    """An `Engine` whose worker computes on claims, and exchanges gradients for weights with the servers.

    Args:
        balancer: Measures; sizes come from the servers.
        link: To the servers, where this worker has taken its place.
        served: What was said of the run.
        layouts: What lies on which shard.
        parameters: The trained parameters by name.
        optimizer: The user's, whose options go with every push.
        spec: It, as the servers know it.
        clock: Seconds that do not go back.
        ahead: How many claims to hold beside the one in hand, for data workers to fetch.
    """

    def __init__(
        self,
        *,
        workers: Workers,
        balancer: Balancer,
        link: Link,
        served: Served,
        layouts: Sequence[ShardLayout],
        parameters: dict[str, torch.nn.Parameter],
        optimizer: torch.optim.Optimizer,
        spec: OptimizerSpec,
        clock: Callable[[], float],
        ahead: int,
    ) -> None:
        self.balancer = balancer
        self.workers = workers
        self._link = link
        self._served = served
        self._overlaps = served.exchange == "overlapped"
        self._parameters = ServedParameters(parameters, layouts, link, waits=not self._overlaps)
        self._watched = next(each for each in parameters.values() if each.requires_grad)
        self._watch: RemovableHandle | None = None
        self._layouts = layouts
        self._names: dict[torch.Tensor, str] = {parameter: name for name, parameter in parameters.items()}
        self._optimizer = optimizer
        self._spec = spec
        self._clock = clock
        self._ahead = ahead
        self._shares: ClaimedShares | None = None
        self._sizes: IntArray = np.zeros(0, dtype=np.int64)
        self._pass = -1
        self._epoch = 0
        self._over = True
        self._in_hand: int | None = None
        """The claim that was handed out and has not been pushed."""
        self._forfeited = False
        """Whether the batch in hand became others' before it was pushed."""
        self._counted: list[tuple[int, int]] = []
        """Samples and units of each batch whose gradient the next push holds."""
        self._computed_on = -1
        """The version of the weights in the parameters."""
        self._handed_out_on = -1
        """And what it was when the batch in hand was handed out, which overlapping exchanges outlast."""
        self._told: tuple[Options, ...] | None = None
        self._told_to = -1
        self._pushed: Iteration | None = None
        """The iteration whose push is under way, or was answered last."""
        self._row: list[int] = []
        self._answer: Header | None = None
        """To that push; None once it is written down."""
        self._gradient_version: int | None = None
        self._warned = False
        self._warned_of_weights = False
        self._skipped_in_a_row = 0
        """Whether the run was in its first pass when this worker came; who comes later cannot tell what is wrong."""

    # The loader's side.

    def shares(self, ledger: Ledger, *, epoch: int, depth: int) -> Shares:
        self._pass += 1
        self._epoch = epoch
        self._shares = ClaimedShares(self._more, self.balancer.smallest_batch)
        self._begin_pass()
        return self._shares

    def enter_loader(self) -> None:
        if self._in_hand is not None:
            self._push_nothing()
        self.balancer.enter_loader()
        self._write_down()

    def leave_loop(self) -> None:
        """What this worker has claimed and not computed on goes back to the others."""
        failure = sys.exc_info()[1]
        self.balancer.leave_loop()
        self._in_hand = None
        self._counted.clear()
        if self._over or self.balancer.closed:
            return
        try:
            self._leave_pass()
        except EvenstepError:
            # What the loop fails with says more than what it has led to.
            if failure is None or isinstance(failure, GeneratorExit):
                raise
        finally:
            self._over = True

    def _leave_pass(self) -> None:
        # Also after starting anew: whoever leaves is to have the weights as they are, which do not look ahead.
        self._persist(self._take_answer)
        if not self._over:
            self._persist(self._stop)

    def _stop(self) -> None:
        if self._link.ask("stop").get("weights"):
            self._parameters.take_weights()

    def begin(self, share: Share, piece: MicroBatch, epoch: int) -> None:
        self._in_hand = share.iteration
        self._forfeited = False
        self._handed_out_on = self._computed_on
        self._counted.append((share.samples, share.samples))
        self._gradient_version = None
        self.balancer.begin(share, piece, epoch)

    def weigh_by(self, count: int) -> None:
        units = units_of(self.balancer.iteration, count)
        if self._counted:
            self._counted[-1] = (self._counted[-1][0], units)

    def explained(self, cause: Exception) -> EvenstepError:
        return cause if isinstance(cause, EvenstepError) else WorkerLostError(str(cause))

    def close(self) -> None:
        self.balancer.close()
        if self._watch is not None:
            # Autograd holds it where no garbage collector looks, and with it the engine and the shared memory.
            self._watch.remove()
        self._link.close()

    # The model's side.

    @property
    def synchronises(self) -> bool:
        return True

    @property
    def unsettled(self) -> str | None:
        if self._over:
            return None
        return (
            "in the middle of an epoch only the servers know which samples are done with, so this state repeats the"
            " epoch: save between epochs, or go on from the servers' snapshots with evenstep run --resume"
        )

    def settle(self) -> None:
        """The weights are the servers', which no worker can make alike; between epochs all have the same."""

    def forward_begins(self, model: int, *, synchronises: bool) -> None:
        self.balancer.resume()

    def forward_ends(self, outputs: object) -> None:
        """Nothing: the gradient is complete when backward ends."""

    # The optimizer's side.

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        raise ConfigError(
            "the scheme trains on parameter servers, but your own optimizer was stepped: step the one that prepare"
            " returned"
        )

    def forget_gradients(self) -> None:
        """Batches before the one in hand count no more in the next push."""
        self._counted = self._counted[-1:] if self._in_hand is not None else []

    def step(self) -> None:
        """Push the gradients of the batch in hand, and pull."""
        now = self.balancer.iteration
        if now is not None and self._forfeited:
            # This worker was given up for dead in mid-batch, whose samples are others' now: its gradient is dropped,
            # and the script goes on with the next one.
            if now.paused is None:
                self.balancer.compute_ends()
            self.balancer.steps()
            return
        if self._in_hand is None or now is None:
            raise ConfigError(
                "the optimizer was stepped without a batch in hand: step once for each batch of the loader"
            )
        self.balancer.compute_ends()
        self._warn_of_changed_gradients()
        counted, self._counted = self._counted, []
        self._exchange(now, counted)
        self.balancer.steps()

    def fetch_state(self) -> dict[str, Any]:
        """The state dict of the script's optimizer, with the servers' state."""
        self._finish_exchange()
        states: dict[str, dict[str, object]] = {}
        for encoded in self._persist(self._link.fetch_states):
            states |= decode_states(encoded)
        return {**self._optimizer.state_dict(), "state": state_by_index(self._optimizer, self._names, states)}

    def restore_state(self, state_dict: dict[str, Any]) -> None:
        """Give a state dict of the script's optimizer to it and to the servers."""
        self._finish_exchange()
        self._optimizer.load_state_dict(state_dict)
        self._persist(self._hand_over_state)
        self._optimizer.state.clear()

    # In between.

    def _persist(self, attempt: Callable[[], _Result]) -> _Result:
        """Do it, again where this worker has to start anew."""
        while True:
            try:
                return attempt()
            except ExpiredError:
                if not self._over:
                    self._start_anew()

    def _hand_over_state(self) -> None:
        """The state that the script's optimizer has becomes the servers', which keep it from now on."""
        state_dict = self._optimizer.state_dict()
        if state_dict["state"]:
            states = state_by_name(self._optimizer, self._names, state_dict)
            names = [[each.name for each in layout.parameters] for layout in self._layouts]
            self._link.load_states([encode_states(own) for own in by_shard(states, names)])

    def _begin_pass(self) -> None:
        """Ask for the first claims; a pass that the others have finished is over at once."""
        while True:
            # Before weights come: in a new place, the message of weights first gets those that the worker has.
            self._parameters.view()
            self._heed_changed_weights()
            try:
                self._heed(self._link.ask("begin", number=self._pass, epoch=self._epoch, ahead=self._ahead))
                return
            except ExpiredError:
                continue
            except _Uninitialised:
                self._initialise()

    def _heed(self, answer: Header) -> None:
        """Take in an answer: weights, sizes and claims."""
        if answer.get("initialise"):
            raise _Uninitialised
        if answer.get("weights"):
            self._parameters.take_weights()
        self._computed_on = int(cast("int", answer["version"]))
        self._over = bool(answer["over"])
        assert self._shares is not None
        if "sizes" in answer:  # Which are sent when they have changed.
            self._sizes = np.array(answer["sizes"], dtype=np.int64)
            self.balancer.follow(self._sizes)
        self._shares.plan(self._sizes)
        self._shares.add(
            tuple(
                Claim(number=number, ranges=tuple((start, stop) for start, stop in ranges))
                for number, ranges in cast("Any", answer["claims"])
            )
        )

    def _initialise(self) -> None:
        """This worker's weights are those that the run begins with."""
        self._parameters.put_weights()
        with suppress(ExpiredError):
            # Before the weights, which let all others begin.
            self._hand_over_state()
            self._link.ask("initialise", gradients=True)
            self._optimizer.state.clear()

    def _more(self) -> bool:
        """Nothing is in hand: wait for claims, or for the end of the pass."""
        assert self._shares is not None
        self._finish_exchange()
        if self._over or not self._shares.empty:  # What was awaited may have brought more.
            return not self._over
        try:
            self._heed(self._link.ask("rest"))
        except ExpiredError:
            self._start_anew()
        return not self._over

    def _push_nothing(self) -> None:
        """The batch in hand was not stepped on: its samples are done with, and nothing of it is committed."""
        now = self.balancer.iteration
        assert now is not None
        if now.paused is None:
            self.balancer.compute_ends()
        self._exchange(now, [])

    def _exchange(self, now: Iteration, counted: Sequence[tuple[int, int]]) -> None:
        """Push what has been counted, or nothing."""
        samples, units = (sum(each) for each in zip((0, 0), *counted, strict=True))
        self._finish_exchange()
        if self._in_hand is None:  # This worker has started anew: the batch is the others' to do.
            return
        self._heed_changed_weights()
        norm = 0.0
        if samples:
            norm = self._parameters.put_gradients()
            if math.isfinite(norm):
                self._skipped_in_a_row = 0
            else:
                self._skip(now)
                norm, samples = 0.0, 0
        self._pushed, self._row = now, self.balancer.row(now)
        claim, self._in_hand = self._in_hand, None
        fields: dict[str, object] = {
            "claim": claim,
            "weights": self._handed_out_on,
            "samples": samples,
            "units": units,
            "row": self._row,
            "norm": norm,
        }
        options = options_of(self._spec, self._optimizer)
        if options != self._told or self._told_to != self._link.incarnation:
            fields["options"] = options_to_record(options)
            self._told, self._told_to = options, self._link.incarnation
        began = self._clock()
        try:
            self._link.send("push", gradients=samples > 0, **fields)
        except ExpiredError:
            self._start_anew()
            return
        now.synchronised_seconds = self._clock() - began
        if not self._overlaps:
            self._finish_exchange()

    def _finish_exchange(self) -> None:
        """Wait for the answer to the push that is under way, if one is."""
        try:
            self._take_answer()
        except ExpiredError:
            self._start_anew()

    def _take_answer(self) -> None:
        """As `_finish_exchange`, which starts anew where this one says that it would have to."""
        if not self._link.asking:
            return
        began = self._clock()
        answer = self._link.collect()
        if self._pushed is not None:
            self._pushed.synchronised_seconds += self._clock() - began
        self._answer = answer
        # Where exchanges overlap, the next push is about to take this one's place.
        self._write_down()
        self._heed(answer)

    def _write_down(self) -> None:
        """The iteration that was pushed is over, once it is answered and the script has asked for the next batch."""
        if self._pushed is None or self._pushed.ended is None or self._answer is None:
            return
        held = float(cast("float", self._answer.get("held", 0.0)))
        more: dict[str, object] = {name: self._answer[name] for name in MORE if name in self._answer}
        self.balancer.record_served(self._pushed, self._row, held, more)
        self._answer = None

    def _start_anew(self) -> None:
        """This worker was given up for dead: what it held belongs to others, and it goes on with the weights of now."""
        assert self._shares is not None
        self._shares.drop()
        self._forfeited = self._forfeited or self._in_hand is not None
        self._in_hand = None
        self._counted.clear()
        self._begin_pass()

    def _heed_changed_weights(self) -> None:
        """Weights that the script has put into the model give way to the servers', and it hears of that once."""
        if not self._parameters.changed():
            return
        self._link.has = -1  # They are sent again, even where the servers' are as they were.
        if not self._warned_of_weights:
            self._warned_of_weights = True
            warnings.warn(
                "the model's weights were changed between steps, but under parameter servers they are replaced by the"
                " servers' at the next step: load weights before prepare, or go on from snapshots with evenstep run"
                " --resume",
                stacklevel=2,
            )

    def _skip(self, now: Iteration) -> None:
        """The gradient in hand is not pushed.

        Raises:
            NonfiniteGradientError: The scheme refuses such.
            DivergedError: No later one can be better.
        """
        if self._served.nonfinite == "refuse":
            raise NonfiniteGradientError(
                f"the gradient of iteration {now.number} on worker {self.workers.rank} holds a NaN or an infinity:"
                " lower the learning rate or the loss's scale, or have such pushes skipped with nonfinite=skip"
            )
        self.balancer.skipped += 1
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row == _MAX_SKIPPED or not self._parameters.finite():
            raise DivergedError(
                f"training has diverged by iteration {now.number} of worker {self.workers.rank}: the weights hold a NaN"
                f" or an infinity, or {_MAX_SKIPPED} gradients in a row did; lower the learning rate, and go on from"
                " the last snapshot with evenstep run --resume"
            )
        if self.balancer.skipped == 1:
            warnings.warn(
                f"worker {self.workers.rank} left out a push whose gradient holds a NaN or an infinity; further ones"
                " are counted in loader.statistics()",
                stacklevel=2,
            )

    def watch_gradients(self) -> None:
        """Note what one gradient is like when it is complete, to see whether the script changes it later."""

        def complete(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                self._gradient_version = parameter.grad._version

        self._watch = self._watched.register_post_accumulate_grad_hook(complete)  # type: ignore[no-untyped-call]

    def _warn_of_changed_gradients(self) -> None:
        gradient = self._watched.grad
        if self._warned or gradient is None or self._gradient_version is None:
            return
        if gradient._version != self._gradient_version and self._served.clip is None:
            self._warned = True
            warnings.warn(
                "the gradients were changed between backward and step: under parameter servers clip_grad_norm_ sees"
                " only this worker's part of the batch; have the servers clip with clip=... in the scheme",
                stacklevel=2,
            )


class _Uninitialised(Exception):
    """The servers have no weights yet, and ask for this worker's."""
