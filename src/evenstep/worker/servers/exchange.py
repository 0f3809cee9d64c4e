"""One worker's exchanges with the servers: claims and weights of a pass, pushes and their answers."""

import math
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, final

import numpy as np

from evenstep.core.errors import EvenstepError
from evenstep.core.samples import EpochCosts
from evenstep.core.samples.claims import Claim
from evenstep.protocol import messages
from evenstep.protocol.optimizer import Options
from evenstep.worker.iteration import Iteration
from evenstep.worker.nonfinite import NonfiniteGuard
from evenstep.worker.servers.claimed import ClaimedShares
from evenstep.worker.servers.link import ExpiredError, ServerLink
from evenstep.worker.tracker import Tracker

if TYPE_CHECKING:
    from evenstep.core.values import IntArray


_NOT_STEPPED_ON: Final = (
    "the last batches of an epoch were fetched ahead and not stepped on: the other workers have waited for this one,"
    " and its weights lacked their last commits when its loop ended. Step on every batch that is fetched ahead, or"
    " fetch each batch after the step on the one before"
)

_Result = TypeVar("_Result")


class Parameters(Protocol):
    """A framework's parameters, and the messages in which the servers' weights come."""

    def view(self) -> None:
        """Use the link's messages, which are different in each new place; called before weights arrive."""

    def put_weights(self) -> None:
        """Put the weights into the messages of gradients, to start a run from them."""

    def take_weights(self) -> None:
        """Put the weights that have arrived into the parameters."""

    def finite(self) -> bool:
        """Return whether the servers' weights, as far as they are known here, hold no NaN and no infinity."""


class OptimizerSide(Protocol):
    """A worker's side of the optimizer, which the servers run."""

    def options(self) -> tuple[Options, ...]:
        """The current options of each param group."""

    def hand_over(self) -> None:
        """Send the optimizer's state that this worker has, if any, to the servers."""

    def clear(self) -> None:
        """Forget the state, which the servers have."""


@final
@dataclass(slots=True, eq=False, kw_only=True)
class Batch:
    """A batch of this claim. It is forfeited if the worker has another incarnation when it is pushed."""

    claim: int
    incarnation: int
    version: int
    """The version of the weights that it is computed on; overlapping exchanges bring newer ones before the push."""
    of: Any = None
    """The object that the caller has handed out."""


@final
class ServedExchange:
    """This worker's part in one loop over the loader, a *pass*: claims and weights come, pushes go.

    If the servers give this worker up for dead, the link takes a new place for it and raises an ExpiredError. The
    worker then drops its claims, which belong to others, and continues with the current weights.

    Args:
        nonfinite: Counts the gradients that are left out.
        overlaps: Whether a push is answered while the next batch is computed.
        ahead: How many claims to have besides those that were handed out, for data workers to fetch.
        rejoins: Whether this worker may leave a pass and enter it again alone, since no barrier waits for all.
        before_weights: Called at the beginning of a pass, before its first weights arrive.
        restarted: Called when this worker has a new place: gradients that were not pushed are forfeited.
        keeps: Whether the script may still compute batches when nothing is left to hand out.
        computes: Whether the script is between the forward pass and the backward of a batch, on the same weights.

    Attributes:
        over: Whether this worker takes part in no pass.
        ended: Whether the loop has ended while batches were held, so that their pushes are the last of the pass.
        version: The version of the weights in the parameters.
        shares: The claims of this worker.
        held: The batches that were handed out and not pushed, oldest first.
    """

    shares: ClaimedShares

    def __init__(
        self,
        link: ServerLink,
        tracker: Tracker,
        parameters: Parameters,
        state: OptimizerSide,
        *,
        nonfinite: NonfiniteGuard,
        overlaps: bool,
        ahead: int,
        rejoins: bool = False,
        before_weights: Callable[[], None] = lambda: None,
        restarted: Callable[[], None] = lambda: None,
        keeps: Callable[[], bool] = lambda: False,
        computes: Callable[[], bool] = lambda: False,
    ) -> None:
        self.over = True
        self.ended = False
        self.version = -1
        self.held: list[Batch] = []
        self._link = link
        self._tracker = tracker
        self._parameters = parameters
        self._state = state
        self._nonfinite, self._overlaps = nonfinite, overlaps
        self._least_ahead = self._ahead = ahead
        self._rejoins = rejoins
        self._before_weights = before_weights
        self._restarted = restarted
        self._keeps = keeps
        self._computes = computes
        self._arrived: int | None = None
        """The version of weights that have arrived and are not in the parameters yet."""
        self._number = -1
        self._epoch = -1
        self._mean: int | None = None
        self._costs: tuple[memoryview, ...] = ()
        """The costs of the positions of the pass, as `Begin` takes them; empty if all cost alike."""
        self._pushes = 0
        self._peeked = False
        """True if this worker left the last pass before its end and had pushed nothing."""
        self._sizes: IntArray = np.zeros(0, dtype=np.int64)
        self._sent_options: tuple[int, tuple[Options, ...]] | None = None
        """The incarnation that sent options last, and the options."""
        self._pushed: Iteration | None = None
        """The iteration whose push is under way or was answered last."""
        self._row: list[int] = []
        self._answer: messages.Grant | None = None
        """The answer to the push, until it is recorded."""

    def start(self, epoch: int, *, length: int = 0, costs: EpochCosts | None = None) -> ClaimedShares:
        """Take part in the next pass. Batches of the last one that were not pushed are given up.

        Where workers may rejoin, they take part again in a pass that was only looked at. If samples differ in cost, the
        servers are told the `costs` of the `length` positions of the epoch.
        """
        again = self._rejoins and epoch == self._epoch and (self._peeked or (self.ended and not self._pushes))
        if self.ended and not again:
            self.warn_of_held()
            self.end()
        self.held.clear()
        self.ended = False
        self._number += not again
        self._epoch = epoch
        self._pushes, self._peeked = 0, False
        self._mean = None if costs is None else costs.costs.mean
        self._costs = () if costs is None else (costs.of(np.arange(length)).astype("<u4").view(np.uint8).data,)
        self.shares = ClaimedShares(self._more, self._tracker.smallest_batch, costs)
        self._begin()
        return self.shares

    def _more(self) -> bool:
        """Get a claim to hand out; False if there is none, because the pass or this worker's part of it is over.

        A worker that holds a batch asks for one more claim. It cannot wait for one, since others may wait for it.
        """
        if self._needs_claims():
            self._settle(late=self._computes())  # The answer to the push may bring claims.
        if self.held and self._needs_claims():
            self._ahead = len(self.held) + self._least_ahead
            self._ask(messages.More(ahead=self._ahead))
        if self.held and self.shares.empty and self._keeps():
            self.ended = True
            return False
        while self.shares.empty and not self.over:
            self._rest()
        return not self.shares.empty

    def _needs_claims(self) -> bool:
        return self.shares.empty or len(self.held) + self._least_ahead > self._ahead

    def end(self) -> None:
        """After the loop, wait for the end of the pass. Batches that were not pushed are given up."""
        self.settle()  # The answer to the push may end the pass.
        while not self.over:
            self._rest(ended=True)

    def warn_of_held(self) -> None:
        """Warn if the loop has ended and batches that it left are now given up; not if it only looked at batches."""
        if self.ended and self.held and self._pushes:
            warnings.warn(_NOT_STEPPED_ON, stacklevel=2)

    def _rest(self, *, ended: bool = False) -> None:
        done = self.held[-1].claim if self.held else None
        self.held.clear()
        self.shares.drop()
        self._ask(messages.Rest(done=done, ended=ended))
        self.use_weights()

    def _ask(self, body: messages.More | messages.Rest) -> None:
        try:
            self._take(self._link.ask(body))
        except ExpiredError:
            self._restart()

    def hand_out(self, claim: int, of: object = None) -> Batch:
        """Hand out the batch of this claim."""
        batch = Batch(claim=claim, incarnation=self._link.incarnation, version=self.version, of=of)
        self.held.append(batch)
        return batch

    def forfeited(self, batch: Batch | None) -> bool:
        """True if the samples of a batch that was handed out belong to other workers by now."""
        return batch is not None and batch.incarnation != self._link.incarnation

    def leave(self) -> None:
        """Give back the claims that this worker has not computed, if the pass is not over."""
        self.held.clear()
        if self.over or self._tracker.closed:
            return
        failure = sys.exc_info()[1]
        self._peeked = not self._pushes
        try:
            self.settle()
            if not self.over:  # Open claims go back to the other workers, and this one gets the current weights.
                answer = self.persist(partial(self._link.ask, messages.Stop()))
                self._arrived = answer.version if answer.weights else None
                self.use_weights()
        except EvenstepError:
            # The error that ended the loop says more than its consequences here.
            if failure is None or isinstance(failure, GeneratorExit):
                raise
        finally:
            self.over = True

    def persist(self, attempt: Callable[[], _Result]) -> _Result:
        """Repeat the attempt in a new place if this worker was given up for dead."""
        while True:
            try:
                return attempt()
            except ExpiredError:
                if not self.over:
                    self._restart()

    def settle(self) -> None:
        """Take in the answer to the push under way, if any, and its weights."""
        self._settle()
        self.use_weights()

    def _settle(self, *, late: bool = False) -> None:
        try:
            self._finish(late=late)
        except ExpiredError:
            self._restart()

    def use_weights(self) -> None:
        """Put weights that have arrived into the parameters."""
        if self._arrived is not None:
            self.version, self._arrived = self._arrived, None
            self._parameters.take_weights()

    def _restart(self) -> None:
        """Take part in the pass from a new place, unless this worker's loop has ended."""
        self.held.clear()
        self._arrived = None
        self._restarted()
        self.over = self.ended
        if not self.ended:
            self._begin()

    def _begin(self) -> None:
        """Ask for the first claims, in a new place too; a pass that the others have finished is over at once."""
        self.shares.drop()
        self._ahead = self._least_ahead
        while True:
            # Before weights arrive: in a new place the parameters move into other memory, with their present values.
            self._parameters.view()
            self._before_weights()
            with suppress(ExpiredError):
                begin = messages.Begin(number=self._number, epoch=self._epoch, ahead=self._ahead, mean=self._mean)
                answer = self._link.ask(begin, *self._costs)
                if not isinstance(answer.body, messages.SendWeights):
                    self._take(answer)
                    return
                # The run starts from this worker's weights.
                self._parameters.put_weights()
                self._state.hand_over()  # Before the weights, which let all other workers begin.
                self._link.ask(messages.Initialise(), gradients=True)
                self._state.clear()

    def _take(self, answer: messages.NumberedReply, *, late: bool = False) -> None:
        """Take in the sizes and claims of an answer, and its weights, unless they have to come later."""
        work = answer.body
        assert isinstance(work, messages.Grant)
        if answer.weights:
            self._arrived = answer.version
            if not late:
                self.use_weights()
        self.over = work.over
        if work.sizes is not None:  # Sent only if they have changed.
            self._sizes = np.array(work.sizes, dtype=np.int64)
            self._tracker.follow(self._sizes)
        self.shares.plan(self._sizes)
        self.shares.add(tuple(Claim.of(*each) for each in work.claims))

    def push(self, now: Iteration, batch: Batch, put: Callable[[], float], *, samples: int, units: float) -> bool:
        """Push the gradient of the batches up to this one, unless their samples belong to other workers by now.

        `put` puts the gradient into its messages and returns its norm; 0 `samples` push none. Returns False if the
        gradient is left out, because it is not finite.

        Raises:
            NonfiniteGradientError, DivergedError: See `NonfiniteGuard.skip`.
        """
        self.settle()  # Of the push before, if exchanges overlap.
        if self.forfeited(batch):
            return True
        norm = put()
        if finite := math.isfinite(norm):
            if samples:
                self._nonfinite.passed()
        else:
            self._nonfinite.skip(now, finite=self._parameters.finite())
            samples, norm = 0, 0.0
        del self.held[: self.held.index(batch) + 1]
        try:
            self._push(now, batch, samples=samples, units=units, norm=norm)
        except ExpiredError:
            self._restart()
        if not self._overlaps:
            self.settle()
        return finite

    def _push(self, now: Iteration, batch: Batch, *, samples: int, units: float, norm: float) -> None:
        self._pushed, self._row = now, self._tracker.meter.row(now)
        self._pushes += 1
        options = self._state.options()
        changed = self._sent_options != (self._link.incarnation, options)
        self._sent_options = self._link.incarnation, options
        push = messages.PushGradients(
            claim=batch.claim,
            weights=batch.version,
            samples=samples,
            units=units,
            row=tuple(self._row),
            norm=norm,
            options=options if changed else None,
        )
        began = time.perf_counter()
        self._link.send(push, gradients=samples > 0)
        now.synchronised_seconds = time.perf_counter() - began

    def _finish(self, *, late: bool = False) -> None:
        if not self._link.asking:
            return
        began = time.perf_counter()
        answer = self._link.collect()
        self._answer = answer.body if isinstance(answer.body, messages.Grant) else None
        if self._pushed is not None:
            self._pushed.synchronised_seconds += time.perf_counter() - began
        self.record()  # With overlapping exchanges the next push follows at once.
        self._take(answer, late=late)

    def record(self) -> None:
        """Record the pushed iteration once it is answered and the script has asked for the next batch."""
        if self._pushed is None or self._pushed.ended is None or self._answer is None:
            return
        self._tracker.record_served(self._pushed, self._row, self._answer)
        self._answer = None
