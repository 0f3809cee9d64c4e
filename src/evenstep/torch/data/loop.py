"""The loop over a loader: hands out this worker's batch of each iteration, for any kind of batch."""

import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast, final

import msgspec
from torch.utils.data import DataLoader

from evenstep.core.errors import ConfigError
from evenstep.core.samples import Drawn, EpochCosts, Ledger, OwnShares, Share, Shares, micro_batches
from evenstep.core.values import UNLIMITED, require_whole
from evenstep.torch.data.common_data import checksum_of_batch
from evenstep.torch.data.epochs import Epochs
from evenstep.torch.data.own_data import OwnEpochs
from evenstep.torch.engines.engine import Engine
from evenstep.torch.engines.traces import Traces
from evenstep.worker.hand_outs import HandedOut, Origin
from evenstep.worker.loader_state import Progress, read_state
from evenstep.worker.tracker import Tracker

if TYPE_CHECKING:
    from evenstep.schemes import Scheme
    from evenstep.torch.agree import Terms
    from evenstep.torch.elastic.session import ElasticSession
    from evenstep.torch.session import Session


CLOSED: Final = (
    "this loader belongs to a run that was closed: call prepare again, with your own model, optimizer and loader, or"
    " loop over your own loader"
)

Maker: TypeAlias = Callable[[Share, Share], Any]
"""Makes the batch of this part of a share."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The parts that hand out batches, once all workers agree; `surveyed` as in `BatchLoop`."""

    terms: "Terms"
    scheme: "Scheme"
    engine: Engine
    surveyed: bool


class BatchLoop(ABC):
    """Hands out this worker's batches, in epochs, and follows where the script is.

    Attributes:
        session: The session that this loader belongs to: a `Session`, or an `ElasticSession`.
        source: The user's loader.
        newest: The `Share` of the last batch or micro-batch handed out, which may be fetched ahead; None before any.
        surveyed: Whether `evenstep plan` measures the workers here; nothing should be saved or restored then.
        cost: The costs of the samples, as the user gave them; None if all samples cost the same.
    """

    def __init__(
        self, source: DataLoader[Any], session: "Session | ElasticSession", number: int, cost: object = None
    ) -> None:
        self.cost = cost
        self.surveyed = False
        self.session = session
        self.source = source
        self._origin = Origin(number)  # A reference to the loader itself would keep its data workers alive.
        self._bound: Bound | None = None
        self._at = Progress()
        self._loops = 0
        self._misses = 0
        self._handed_out = 0
        self.newest: Share | None = None
        self._traces: Traces | None = None
        self._left = False
        self._is_finalizing = sys.is_finalizing  # At exit `sys` may be None here when a generator is closed.

    def bind(self, source: DataLoader[Any], bound: Bound) -> None:
        """Start to hand out batches; called by the session once all workers agree.

        Raises:
            ConfigError: No iteration is possible.
        """
        self.source = source
        self._bound = bound
        self.surveyed = bound.surveyed
        terms, engine = bound.terms, bound.engine
        self._epochs: Epochs | OwnEpochs = (
            Epochs(terms, source, engine, self._at)
            if terms.own is None
            else OwnEpochs(terms, source, engine, self._at, self.number)
        )

    @property
    def bound(self) -> bool:
        """True if it can hand out batches."""
        return self._bound is not None

    @property
    def number(self) -> int:
        """The number of this loader in the session."""
        return self._origin.number

    @property
    def engine(self) -> Engine:
        """Keeps this worker in step with the others; for evenstep's own use. Starts the session."""
        return self._started.engine

    @property
    def _started(self) -> Bound:
        if self._bound is None:
            self.session.start_with(self)
        assert self._bound is not None
        return self._bound

    @property
    def _tracker(self) -> Tracker:
        return self.engine.tracker

    @property
    def global_batch_size(self) -> int:
        """Samples in one iteration, over all workers."""
        return self._epochs.global_batch_size if self._bound else self.session.expected_batch_size(self.source)

    @property
    def scheme(self) -> str:
        """The name of the scheme."""
        return self._started.scheme.name

    @property
    def _batch(self) -> HandedOut | None:
        """The batch that is computed now, if this loader has handed it out."""
        return None if self._bound is None else self._bound.engine.hand_outs.latest_of(self._origin)

    @property
    def current(self) -> Share | None:
        """This worker's `Share` of the current iteration; None before the first.

        If `current.samples` is 0, the batch is a copy of another worker's sample and its gradient does not count: leave
        it out of metrics. If batches are fetched ahead, this is the share of the last forward pass.
        """
        batch = self._batch
        return None if batch is None else batch.share

    @property
    def iteration(self) -> int:
        """The number of iterations that have begun completely, over all epochs of this process.

        An iteration is a batch, or several micro-batches. Batches that are fetched ahead have not begun.
        """
        batch = self._batch
        return 0 if batch is None else batch.iteration

    @property
    def unstepped(self) -> int:
        """The number of iterations that have begun since the optimizer last stepped."""
        return self.iteration - self._origin.stepped

    @property
    def batch_sizes(self) -> list[int]:
        """The batch sizes of all workers in the current iteration, or those planned for the first."""
        sizes = self._tracker.planned_sizes() if self.current is None else self.current.sizes
        return cast("list[int]", sizes.tolist())

    @property
    def epoch(self) -> int:
        """The epoch of the current loop; between loops, the epoch of the next."""
        self.session.follow(self)
        if self._at.looping or (self._peeked and not self._at.chosen):
            return self._at.epoch
        return self._at.next_epoch

    @property
    def next_position(self) -> tuple[int, int] | None:
        """The epoch and iteration at which the next loop begins, None inside a loop; for evenstep's own use."""
        return None if self._at.looping else (self._at.next_epoch, self._at.resume or 0)

    @property
    def _peeked(self) -> bool:
        """True if no batch of the last loop was computed; the next loop then repeats its epoch."""
        return self._origin.computed is False

    @property
    def synchronises(self) -> bool:
        """True if the optimizer steps on the current batch; of several micro-batches, only on the last."""
        self.engine.window.asked = True
        return self.engine.synchronises

    def __len__(self) -> int:
        """Iterations in an epoch, the same on every worker; for a batch sampler, its length or the last count.

        Where an iteration is a period in which each worker steps alone, the batches of a worker, on average.

        Raises:
            TypeError: Each worker draws from data of its own, so that the number depends on the workers' speeds.
        """
        if self._draws_own:
            raise TypeError("a loader of each worker's own data has no length: it depends on the workers' speeds")
        batches = self.session.batches_in_iteration
        return min(self.iterations(batches), self.iterations() * batches)

    @property
    def _draws_own(self) -> bool:
        """True if each worker draws from data of its own, as many samples as its size says."""
        if self._bound is None:
            return self.session.draws_own(self.source)
        return self._bound.terms.own is not None

    def iterations(self, parts: int = 1) -> int:
        """Like `len` for iterations cut into `parts`, but also for an epoch that never ends; for evenstep's own use."""
        if self._bound is None:
            return self.session.expected_length(self.source, parts)
        return self._epochs.iterations(parts)

    def start_at(self, iteration: int) -> None:
        """Make the next loop begin at this iteration of its epoch, as if those before it had been computed.

        Call it after `set_epoch`, which resets the next loop to a whole epoch.

        Raises:
            ConfigError: The iteration is not a whole number >= 0, or it is not known what was taken before it.
        """
        if self._draws_own:
            raise ConfigError(
                "a loader of each worker's own data cannot start at an iteration, whose samples depended on the"
                " workers' speeds: give load_state_dict what state_dict returned there"
            )
        self._at.start_at(require_whole("iteration", iteration, 0, UNLIMITED))

    def set_epoch(self, epoch: int) -> None:
        """Make the next loop this epoch. Without this call, epochs count up.

        Raises:
            ConfigError: The epoch is not a whole number >= 0.
        """
        epoch = require_whole("epoch", epoch, 0, UNLIMITED)
        if self._bound is None:
            self._at.set_next(epoch)
        else:
            self._epochs.set_next(epoch)

    def release(self) -> None:
        """Release the data workers, if there are any; called by the session."""
        self._let_go()

    def __iter__(self) -> Iterator[Any]:
        self._require_current(self._loops)
        self._loops += 1
        loop, engine = self._loops, self.engine
        ledger, shares, make, cut = self._begin_loop()
        misses = self._misses
        self._at.looping = self._left = True
        alike = self._started.terms.alike
        try:
            while (share := shares.share()) is not None:
                pieces = [share] if cut is None else cut(share)
                for number, piece in enumerate(pieces, 1):
                    batch = make(share, piece)
                    if piece.last:
                        shares.advance()
                        self._at.done = ledger.iteration
                    self._handed_out += piece.last
                    self.newest, self._origin.computed = piece, bool(self._origin.computed)
                    self._traces = Traces(batch, len(piece.positions), self._traces)
                    engine.hand_out(
                        HandedOut(
                            share=share,
                            piece=piece,
                            epoch=self._at.epoch,
                            iteration=self._handed_out,
                            done=self._at.done,
                            origin=self._origin,
                            checksum=checksum_of_batch(batch) if alike else 0,
                            traces=self._traces,
                        )
                    )
                    yield batch
                    del batch  # The next batch can reuse its memory, unless the script keeps it.
                    if loop != self._loops or self.session.closed:
                        self._require_current(loop)
                    engine.enter_loader()
                    if cut is not None and (redivided := engine.redivided()) is not None:
                        share, pieces[number:] = redivided, cut(redivided)[number:]
                shares.replan()
                self._misses = misses + shares.misses
            self._at.done = ledger.iterations
            self._left = False
            self.engine.end_loop()
        finally:
            if loop == self._loops and not self._is_finalizing():
                self._leave()

    def _leave(self) -> None:
        self._at.looping = False
        self.engine.leave_loop()
        self._let_go()

    def _require_current(self, loop: int) -> None:
        if self.session.closed:
            raise ConfigError(CLOSED)
        if loop != self._loops:
            raise ConfigError(
                "another loop over the prepared loader began, or a state was loaded, before this loop ended: leave the"
                " loop first"
            )

    def _begin_loop(self) -> tuple[Ledger | OwnShares, Shares, Maker, Callable[[Share], list[Share]] | None]:
        bound, peeked = self._started, self._peeked
        bound.engine.begin_loop(self._origin)
        if peeked or self._left:
            bound.engine.hand_outs.abandon(self._origin)
        self._origin.computed = None
        if not bound.engine.synchronises:
            raise ConfigError(
                "a loop over micro-batches was left in the middle of an iteration, where the other workers may wait for"
                " this one: leave it where loader.synchronises is True"
            )
        bound.engine.enter_loader()
        if self._left and not peeked:
            bound.engine.settle()  # Or else loops that end within a period would never meet.
        if isinstance(self._epochs, OwnEpochs):
            own = self._epochs.begin(again=peeked)
            return own.shares, own.shares, own.make, None
        drawn, ledger = self._epochs.begin(again=peeked)
        costs = None if bound.terms.costs is None else EpochCosts(bound.terms.costs, drawn.indices)
        size, fewest = bound.scheme.micro_batch, bound.terms.needed_batch
        cut = None if size is None else partial(micro_batches, size=size, costs=costs, fewest=fewest)
        more = {"costs": costs, "lengths": bound.terms.lengths}
        given = {name: each for name, each in more.items() if each is not None}
        shares = bound.engine.shares(ledger, epoch=self._at.epoch, depth=bound.terms.depth, **given)
        return ledger, shares, self._maker(shares, drawn), cut

    @abstractmethod
    def _maker(self, shares: Shares, drawn: Drawn) -> Maker:
        """Return the function that makes the batches of an epoch."""

    @abstractmethod
    def _let_go(self) -> None:
        """Request nothing more of data workers in this epoch."""

    def state_dict(self) -> dict[str, Any]:
        """The state of the run at this point of the loop; it resumes within an epoch, on any number of workers.

        Plain numbers, lists, dicts and strings. One worker's state serves all workers, except under local SGD within an
        epoch before `settle`, where it gives a warning. Where each worker draws from data of its own, it resumes on as
        many workers.
        """
        if self.engine.unsettled is not None:
            warnings.warn(self.engine.unsettled, stacklevel=2)
        return self.state_before(0)

    def state_before(self, iterations: int) -> dict[str, Any]:
        """The state so many iterations before this point, within the epoch; for evenstep's own use."""
        return msgspec.structs.asdict(self._epochs.state(max(self._done - iterations, 0), self._tracker))

    @property
    def _done(self) -> int:
        """Iterations of the epoch that have begun; a resumed run fetches the batches ahead of them again."""
        batch, ahead = self._batch, self.engine.hand_outs.ahead
        waits = batch is not None and any(each.origin is self._origin and each is not batch for each in ahead)
        return batch.done if batch is not None and waits else self._at.done - self.engine.uncounted

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from where `state_dict` was called. Its global batch size and seed win, with a warning.

        If that was in the last iteration of a loop, the next loop is empty, so that the script continues with what it
        does between loops. A loop that goes on meanwhile is over: its next batch raises.

        Raises:
            ConfigError: The state is of another dataset or version, or is damaged, or its global batch size cannot be
                divided among these workers.
        """
        saved, tracker = read_state(state), self._tracker
        if self._at.looping:
            self._loops += 1  # The script has to leave its loop, whose next batch would be of the old epoch.
            self._leave()
        self._epochs.restore(saved, tracker)
        self.engine.start_over()
