"""The engine of a replica: its members, the slices that they have computed together, and its record of both."""

import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, final

import torch
from msgspec import structs

from evenstep.core.load.limits import SizeLimits
from evenstep.core.load.members import Members
from evenstep.core.samples import Ledger, Lookahead, Request, Share, Shares
from evenstep.schemes import Scheme
from evenstep.telemetry import JsonlRecorder, Silent
from evenstep.telemetry.events import ELASTIC, Event, MembersChanged, NotCounted, Planned, Run, WorkerEvent
from evenstep.torch.agree import Terms
from evenstep.torch.elastic.quorum import BrokenQuorumError, Quorum
from evenstep.torch.engines.engine import Engine
from evenstep.torch.processes.workers import Workers, gather
from evenstep.worker.agreement import Agreed
from evenstep.worker.hand_outs import HandedOut
from evenstep.worker.meter import Rows
from evenstep.worker.tracker import Tracker

NO_BACKWARD: Final = "no backward ran over the last batch of the loader: every batch needs one, before the step"


class ElasticEngine(Engine):
    """Keeps a replica in step with the members, who may be others in each step.

    A step, or a period of local steps, counts if all that the members sent has arrived. If not, nothing has changed,
    and those that are left compute the same slices again.

    Args:
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
        terms: Terms,
        settle: Callable[[], bool],
        *,
        scheme: Scheme,
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
        self._iterations = scheme.period_in_iterations
        """What a step of the quorum has, at most."""
        self._ended = True
        """Whether the batch that was handed out last has ended."""
        self._rows = Rows(tracker.meter, partial(gather, workers.processes), workers.peers)

    def meets(self, epoch: int) -> bool:
        """Meet the other members for the next step; False if this epoch is over, of which others may have told.

        Raises:
            ConfigError: Something cannot work on this replica or on another, which is named.
            DisagreementError: The replicas were started with different things.
        """
        while self.at[0] <= epoch and not self.underway:
            self._quorum.open()
            if not self._quorum.broken and (not self._quorum.changed or self._settle()):
                self._quorum.settled()
                break
            self._quorum.give_up()
        return self.at[0] <= epoch

    @property
    def underway(self) -> bool:
        """True if slices were computed that are yet to count."""
        return False

    @property
    def number(self) -> int:
        """The number of the iteration with which the next step of the quorum begins, or a larger one, on all alike."""
        return self._quorum.step * self._iterations

    def regroup(self, workers: Workers, keys: tuple[int, ...], agreed: Agreed, terms: Terms) -> None:
        """From now on these are the members, who have agreed on this."""
        load, tracker = agreed.scheme.load, self.tracker
        self._present = Members.of(load, keys, self.members)
        problem, limits = replace(agreed.problem, epoch=self.at[0]), SizeLimits(load, agreed.problem, agreed.limits)
        tracker.regroup(workers, self._present.policy, problem, limits, self.number)
        self._rows = Rows(tracker.meter, partial(gather, workers.processes), workers.peers)
        assert workers.rows is not None
        self.workers = replace(workers, rows=partial(self._rows_of_all, workers.rows))
        self.depth, self.uncounted = terms.depth, 0
        self.groups += 1

    def _rows_of_all(self, of: Callable[[torch.Tensor], torch.Tensor], row: torch.Tensor) -> torch.Tensor:
        try:
            return of(row)
        except BrokenQuorumError:
            warnings.warn(
                "a replica was lost in an exchange of the script, whose result is of this one alone", stacklevel=6
            )
            return row.unsqueeze(0)

    @abstractmethod
    def steps(self, optimizer: torch.optim.Optimizer) -> bool:
        """Called when the script asks for a step of this optimizer; returns whether it takes place."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: the session asks `steps` before any step."""

    def _commit(self, last: HandedOut) -> bool:
        """End the step of the quorum, of which this is the last batch; returns whether it counts."""
        self.counted, tracker = self._quorum.commit(), self.tracker
        if self.counted:
            self.members = self._present
            share = last.share
            self.at = (last.epoch + 1, 0) if share.ends_epoch else (last.epoch, share.iteration + 1)
            return True
        self.uncounted, tracker.meter.received = last.share.iteration + 1 - self.at[1], None
        tracker.recorder.record(NotCounted(worker=self.workers.rank, iteration=self.number, at=tracker.clock()))
        return False

    def _shares_of(self, ledger: Ledger, *, epoch: int, depth: int) -> Shares:
        self.at = max(self.at, (epoch, ledger.iteration))
        return _QuorumShares(self, ledger, epoch)

    def enter_loader(self) -> None:
        """End the step, or the batch of a period, and learn from it."""
        self._end_batch()
        self.tracker.enter_loader()
        if self.counted:
            self.tracker.learn()

    def batch_ends(self) -> None:
        self.enter_loader()

    @abstractmethod
    def _end_batch(self) -> None:
        """End the current batch, unless this has happened.

        Raises:
            ConfigError: No backward has run over it.
        """


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


@final
class ReplicaRecorder:
    """Records the events of the replica in this `slot` of so many `slots` of its host.

    The rank of a replica, and of those in its plans, is another one after each change of the members.
    """

    def __init__(self, recorder: JsonlRecorder | Silent, slot: int, slots: int) -> None:
        self._recorder = recorder
        self._slot, self._slots = slot, slots
        self._here: dict[int, int] = {}  # The slots of the members on this host, by rank.
        self._begun = False

    def record(self, event: Event) -> None:
        """Append the event."""
        if isinstance(event, WorkerEvent):
            event = structs.replace(event, worker=self._slot)
        if isinstance(event, Planned):
            sizes = {slot: event.batch_sizes[rank] for rank, slot in self._here.items()}
            event = structs.replace(event, batch_sizes=[sizes.get(slot, 0) for slot in range(self._slots)])
        self._recorder.record(event)

    def members(self, told: Sequence[Mapping[str, Any]], rank: int, run: Run, iteration: int) -> None:
        """The members, by rank, have told their `slot` and `host`; `run` is the first event, unless it is written."""
        self._here = {each: one["slot"] for each, one in enumerate(told) if one["host"] == told[rank]["host"]}
        if not self._begun:
            self.record(structs.replace(run, engine=ELASTIC, workers=self._slots, minimum=(), maximum=()))
            self._begun = True
        if rank == min(self._here):
            here, elsewhere = sorted(self._here.values()), len(told) - len(self._here)
            self.record(
                MembersChanged(
                    worker=self._slot, iteration=iteration, at=run.at or 0.0, members=here, elsewhere=elsewhere
                )
            )

    def close(self) -> None:
        """No more events follow."""
        self._recorder.close()
