"""Shard 0: runs the coordinator and has every shard carry out its commands, in the same order."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import final

from evenstep.core.activity import Seen
from evenstep.core.coordinate import (
    Answer,
    Apply,
    Arrival,
    Coordinator,
    CoordinatorCommand,
    Given,
    Lost,
    Presence,
    PushKey,
)
from evenstep.core.errors import ConfigError, DisagreementError, ProtocolError
from evenstep.core.samples.pass_costs import PassCosts
from evenstep.core.supervision import Why
from evenstep.protocol.messages import Grant, PushGradients, SendWeights
from evenstep.protocol.shard_messages import ShardInitialise, ShardLeave
from evenstep.server.all_shards import AllShards
from evenstep.server.commits import Commits
from evenstep.server.journal import Journal
from evenstep.server.saving import Saving
from evenstep.server.serving import BrokenServerError
from evenstep.server.shard_state import ShardState
from evenstep.telemetry import Recorder, events
from evenstep.transport.base import Connection


@final
class Primary:
    """Decides for all shards; one call at a time.

    Args:
        shard_state: Shard 0's own part.
        followers: Connections to the other shards, in their order.
        recorder: Receives events.
        first_incarnation: Incarnations are numbered from here. Two servers of a run must not give out the same number.
        clock: A clock in seconds that does not go back.
        say: Receives sentences for the user.
        report: Receives an event when a worker comes or goes or a pass begins, for the process that supervises the run.
    """

    def __init__(
        self,
        *,
        shard_state: ShardState,
        followers: Sequence[Connection],
        recorder: Recorder,
        first_incarnation: int,
        clock: Callable[[], float],
        say: Callable[[str], None],
        report: Callable[[Mapping[str, object]], None],
    ) -> None:
        self.shard_state = shard_state
        self._clock = clock
        self._shards = AllShards(shard_state, followers)
        self._journal = Journal(self._shards, recorder, say, now=clock())
        self._record = self._journal.record
        self._commits = Commits(shard_state)
        self._presence = Presence(shard_state.settings.heartbeat_seconds)
        self._report = report
        self._reported_pass = -1
        self._saving = Saving(self._shards, clock=clock, journal=self._journal, say=say)
        self._coordinator: Coordinator | None = None
        self._incarnation = first_incarnation
        self._initialiser: int | None = None
        self._begins: dict[int, tuple[int, int, int, PassCosts | None]] = {}
        """The passes that workers asked to begin before the run had weights."""

    @property
    def coordinator(self) -> Coordinator:
        """The coordinator; ProtocolError before the first worker has described the run."""
        if self._coordinator is None:
            raise ProtocolError("a worker made a request before it described the run")
        return self._coordinator

    @property
    def version(self) -> int:
        """The version of the weights."""
        return self.shard_state.version

    @property
    def progress(self) -> int:
        """The number of events, by which waiting workers see that the servers make progress."""
        return self._journal.events

    # Workers join and leave.

    def start(
        self, worker: int, encoded: bytes, connection: Connection, has: int, limit_seconds: float = math.inf
    ) -> int:
        """Let a worker join as a new incarnation, which replaces an older one; return its number.

        Args:
            worker: Its rank.
            encoded: Its description of the run.
            connection: The connection to it.
            has: The version of its weights. If the servers' is older, commits are lost.
            limit_seconds: How long it may keep others waiting without making a request.
        """
        self._define(encoded)
        self._journal.commits_lost(worker, self._clock(), has=has, lost=has - self.coordinator.version)
        if worker in self.shard_state.slots:
            self.lose(worker, self.shard_state.slots[worker].incarnation, Why.AGAIN)
        self._incarnation += 1
        self.shard_state.slot(worker, self._incarnation, connection)
        self.coordinator.join(worker)
        now = self._clock()
        self._presence.joined(worker, limit_seconds, now)
        self._record(events.Joined(at=now, version=self.version, worker=worker, incarnation=self._incarnation))
        self._report({"event": "join", "worker": worker, "limit_seconds": limit_seconds})
        self._ask_to_initialise()
        return self._incarnation

    def _define(self, encoded: bytes) -> None:
        known = self.shard_state.spec
        spec = self.shard_state.define(encoded)
        if known is not None:
            return
        scheme, problem = spec.scheme, spec.problem
        if scheme.served is None:
            raise ConfigError(f"the scheme {scheme.name!r} does not use servers: start none")
        coordinator = Coordinator(
            sync=scheme.sync, load=scheme.load, problem=problem, length=spec.length, drop_last=spec.drop_last
        )
        if self.shard_state.settings.resume:
            self._saving.restore(coordinator)
        self._coordinator = coordinator
        self._journal.define(spec)
        for worker in range(self.shard_state.settings.workers):
            self._presence.expect(worker, self._clock())

    def met(self, worker: int) -> None:
        """Report that the worker waits for the others before the run begins."""
        self._report({"event": "meet", "worker": worker})

    def heard(self, worker: int, seen: Seen | None = None) -> None:
        """Note that something arrived from the worker; a pulse says what its main thread does."""
        self._presence.heard(worker, self._clock(), seen)

    def asked(self, worker: int) -> None:
        """Note that the main thread of the worker made a request."""
        self._presence.asked(worker, self._clock())

    def lose(self, worker: int, incarnation: int, why: Why, seconds: float = 0.0) -> None:
        """Stop waiting for a worker that has left, or was silent or hung for this many seconds."""
        slot = self.shard_state.slots.get(worker)
        if slot is None or slot.incarnation != incarnation:
            return
        early = self._report_left(worker, why, seconds) and why is Why.DONE
        self._begins.pop(worker, None)
        # Announced pushes are still committed.
        announced = self._commits.announced(worker, incarnation)
        self._shards.do(ShardLeave(worker=worker, incarnation=incarnation, announced=announced))
        now = self._clock()
        self._record(events.Left(at=now, version=self.version, worker=worker, why=why, early=early))
        if self._initialiser == worker:
            self._initialiser = None
        self._carry_out(self.coordinator.leave(worker, now))
        self._ask_to_initialise()

    def _report_left(self, worker: int, why: Why, seconds: float) -> bool:
        """Report that the worker has left; return True if it was in the middle of a pass."""
        now, in_loop = self._clock(), self.coordinator.in_loop(worker)
        doing = self._presence.last_activity(worker, now, seconds if why is Why.HUNG else math.inf)
        self._presence.left(worker)
        about = {"worker": worker, "why": why, "seconds": seconds, "in_loop": in_loop, "doing": doing}
        self._report({"event": "leave", "number": self.coordinator.passes.number, **about})
        return in_loop

    # Time passes.

    def look(self) -> None:
        """Give up silent and hanging workers, and record and save what is due. Call it often."""
        now = self._clock()
        receiving = [worker for worker, slot in self.shard_state.slots.items() if slot.receiving]
        for lost in self._presence.look(now, self._waited_for(), receiving):
            self._give_up(lost, now)
        self._report_pass()
        self._saving.look(self._coordinator, now)
        self._journal.tally(now, self._samples)

    def _give_up(self, lost: Lost, now: float) -> None:
        worker = lost.worker
        slot = self.shard_state.slots.get(worker)
        if slot is not None:
            self.lose(worker, slot.incarnation, lost.why, lost.seconds)
        elif self.coordinator.awaits(worker):
            self._record(events.Left(at=now, version=self.version, worker=worker, why=lost.why, early=False))
            self._report_left(worker, lost.why, lost.seconds)
            self._carry_out(self.coordinator.leave(worker, now))
            self._ask_to_initialise()
        else:
            self._presence.left(worker)

    def _waited_for(self) -> list[int]:
        if self._coordinator is None:
            return []
        waited = self._coordinator.waited_for()
        if self._begins:
            waited += self.shard_state.slots.keys() - self._begins.keys()
        return waited

    def _report_pass(self) -> None:
        number = -1 if self._coordinator is None else self._coordinator.passes.number
        if number > self._reported_pass:
            self._reported_pass = number
            self._report({"event": "pass", "number": number})

    # A pass.

    def begin(self, worker: int, number: int, epoch: int, ahead: int, costs: PassCosts | None = None) -> None:
        """Begin a worker's pass. In a new run, none is answered before all have begun, so that all take part."""
        if self.version < 0:
            self._begins[worker] = (number, epoch, ahead, costs)
            self._ask_to_initialise()
            return
        now = self._clock()
        commands = self.coordinator.begin(worker, number, epoch, now, ahead=ahead, costs=costs)
        begun = events.Begun(at=now, version=self.version, worker=worker, number=number, epoch=epoch, ahead=ahead)
        self._record(begun)
        self._carry_out(commands)

    def _ask_to_initialise(self) -> None:
        """Ask the worker with the lowest rank for its weights, once all workers have come and asked to begin."""
        missing = self._begins.keys() != self.shard_state.slots.keys()
        if self._initialiser is None and self._begins and not missing and not self._awaits_any:
            self._initialiser = min(self._begins)
            del self._begins[self._initialiser]
            self._shards.reply(self._initialiser, SendWeights())

    @property
    def _awaits_any(self) -> bool:
        return any(map(self.coordinator.awaits, range(self.shard_state.settings.workers)))

    def initialised(self, worker: int) -> None:
        """Begin the run with the weights that the worker has staged on every shard."""
        if self.version >= 0 or worker != self._initialiser:
            raise ProtocolError(f"worker {worker} sent initial weights without being asked for them")
        self._shards.do(ShardInitialise(worker=worker, version=self.coordinator.version))
        self._initialiser = None
        # From now on there is always a snapshot to go back to.
        self._saving.write(self._coordinator)
        begins, self._begins = self._begins, {}
        for waiting, begin in sorted(begins.items()):
            try:
                self.begin(waiting, *begin)
            except DisagreementError as error:  # The waiting worker is at fault, not the one that sent the weights.
                self._shards.refuse(waiting, error)

    def push(self, key: PushKey, push: PushGradients) -> None:
        """Take in a worker's push, which is staged on every shard; errors as for `Commits.announce`."""
        now = self._clock()
        arrival = Arrival(
            key=key, claim=push.claim, version=push.weights, samples=push.samples, units=push.units, row=push.row
        )
        self._commits.announce(key, push)
        try:
            commands = self.coordinator.push(arrival, now)
        except ProtocolError:
            self._commits.forget(key)
            raise
        self._record(
            events.Pushed(
                at=now,
                version=self.version,
                worker=key[0],
                claim=push.claim,
                pulled=push.weights,
                samples=push.samples,
                units=push.units,
                row=push.row,
            )
        )
        self._carry_out(commands)

    def more(self, worker: int, ahead: int) -> None:
        """Take in that a worker fetches ahead of what it computes."""
        now = self._clock()
        commands = self.coordinator.more(worker, ahead)
        self._record(events.FetchedAhead(at=now, version=self.version, worker=worker, ahead=ahead))
        self._carry_out(commands)

    def rest(self, worker: int, done: int | None, *, ended: bool) -> None:
        """Take in that a worker waits for claims, or for the end of the pass."""
        now = self._clock()
        commands = self.coordinator.rest(worker, now, done=done, ended=ended)
        self._record(events.Rested(at=now, version=self.version, worker=worker, done=done, ended=ended))
        self._carry_out(commands)

    def stop(self, worker: int) -> None:
        """Take in that a worker has left its loop."""
        now = self._clock()
        commands = self.coordinator.stop(worker, now)
        self._record(events.Stopped(at=now, version=self.version, worker=worker))
        self._carry_out(commands)
        self._shards.reply(worker)

    def _carry_out(self, commands: Sequence[CoordinatorCommand]) -> None:
        """Carry out commands.

        Raises:
            BrokenServerError: A command failed. Decisions cannot be taken back, so this server must end.
        """
        try:
            for command in commands:
                if isinstance(command, Apply):
                    self._shards.do(self._commits.make(command))
                elif isinstance(command, Answer):
                    self._answer(command)
                elif isinstance(command, Given):
                    claims = tuple((claim.number, claim.ranges) for claim in command.claims)
                    self.shard_state.give(command.worker, Grant(claims=claims, over=False))
                else:
                    self._record(
                        events.Regrouped(
                            at=self._clock(), version=self.version, groups=command.groups, reason=command.reason
                        )
                    )
        except Exception as error:
            raise BrokenServerError("the servers could not carry out a decision") from error

    def _answer(self, answer: Answer) -> None:
        if answer.over:
            # Before any worker learns of it: a restarted server must not be in the middle of a pass that has ended.
            self._saving.write(self._coordinator)
        self._journal.answered(answer, self._clock())
        slot = self.shard_state.slots.get(answer.worker)
        workers = self.shard_state.settings.workers
        sizes = None if slot is None else slot.changed_sizes(self.coordinator.sizes.all(), workers)
        self._shards.reply(answer.worker, *self._commits.answer(answer, sizes), whole=answer.whole)

    def finish(self) -> None:
        """Record and save everything and print the summary, before the servers end."""
        self._report_pass()
        self._journal.tally(self._clock(), self._samples, every=0.0)
        self._saving.write(self._coordinator)
        self._journal.summarise()

    @property
    def _samples(self) -> int:
        return 0 if self._coordinator is None else self._coordinator.samples
