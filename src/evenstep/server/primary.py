"""Shard 0: runs the coordinator and has every shard carry out its commands, in the same order."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import final

from evenstep.core.activity import Seen
from evenstep.core.coordinate import Answer, Apply, Arrival, Coordinator, CoordinatorCommand, Discard, Given
from evenstep.core.errors import ConfigError, DisagreementError, ProtocolError
from evenstep.core.samples.pass_costs import PassCosts
from evenstep.core.supervision import Why
from evenstep.protocol.messages import Drained, SendWeights
from evenstep.protocol.optimizer import Options
from evenstep.server.all_shards import AllShards
from evenstep.server.attendance import Attendance
from evenstep.server.commits import Commits
from evenstep.server.journal import Journal
from evenstep.server.presence import Presence
from evenstep.server.saving import Saving
from evenstep.server.serving import BrokenServerError
from evenstep.server.shard.snapshots import Snapshots
from evenstep.server.shard_state import ShardState
from evenstep.telemetry import Recorder
from evenstep.transport.base import Connection


@final
class Primary:
    """Decides for all shards; one call at a time.

    Args:
        shard_state: Shard 0's own part.
        workers: Number of workers of the run.
        followers: Connections to the other shards, in their order.
        snapshots: Where to find the snapshot from which to continue.
        resume: Whether to continue from a snapshot.
        snapshot_seconds: Time between two snapshots.
        heartbeat_seconds: How long a worker may be silent.
        recorder: Receives events.
        first_incarnation: Incarnations are numbered from here. Two servers of a run must not give out the same number.
        clock: A clock in seconds that does not go back.
        say: Receives sentences for the user.
        report: Receives an event when a worker joins, leaves or misses a pass, for the process that supervises the run.
        name_lost: Whether the summary names lost workers.
        drained: Makes the answer to `Drain`, when no worker is left.
    """

    def __init__(
        self,
        *,
        shard_state: ShardState,
        workers: int,
        followers: Sequence[Connection],
        snapshots: Snapshots,
        resume: bool,
        snapshot_seconds: float,
        heartbeat_seconds: float,
        recorder: Recorder,
        first_incarnation: int,
        clock: Callable[[], float],
        say: Callable[[str], None],
        report: Callable[[Mapping[str, object]], None],
        name_lost: bool = True,
        drained: Callable[[], Drained] = Drained,
    ) -> None:
        self.shard_state = shard_state
        self._workers = workers
        self._resume = resume
        self._heartbeat_seconds = heartbeat_seconds
        self._clock = clock
        self._shards = AllShards(shard_state, followers)
        self._journal = Journal(self._shards, recorder, say, name_lost=name_lost, now=clock())
        self._commits = Commits(shard_state)
        self._presence = Presence(shard_state.slots, heartbeat_seconds, clock())
        self._attendance = Attendance(report, drained)
        self._saving = Saving(self._shards, snapshots, snapshot_seconds, clock=clock, journal=self._journal, say=say)
        self._coordinator: Coordinator | None = None
        self._incarnation = first_incarnation
        self._initialiser: int | None = None
        self._begins: dict[int, tuple[int, int, int, PassCosts | None]] = {}
        """The passes that workers asked to begin before the run had weights."""

    @property
    def coordinator(self) -> Coordinator:
        """What decides; ProtocolError before the first worker has described the run."""
        if self._coordinator is None:
            raise ProtocolError("a worker made a request before it described the run")
        return self._coordinator

    @property
    def events(self) -> int:
        """Counts events, so that waiting workers can see that the servers make progress."""
        return self._journal.events

    # Workers join and leave.

    def start(
        self, worker: int, encoded: bytes, connection: Connection, has: int, limit_seconds: float = math.inf
    ) -> int:
        """A worker joins as a new incarnation, which replaces an older one; returns its number.

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
        self._journal.joined(worker, now, self._incarnation)
        self._attendance.joined(worker, limit_seconds)
        self._ask_to_initialise()
        return self._incarnation

    def _define(self, encoded: bytes) -> None:
        known = self.shard_state.spec
        spec = self.shard_state.define(encoded, self._workers)
        if known is not None:
            return
        scheme, problem = spec.scheme, spec.problem
        if scheme.served is None:
            raise ConfigError(f"the scheme {scheme.name!r} does not use servers: start none")
        coordinator = Coordinator(
            sync=scheme.sync, load=scheme.load, problem=problem, length=spec.length, drop_last=spec.drop_last
        )
        if self._resume:
            self._saving.restore(coordinator, self._workers)
        self._coordinator = coordinator
        self._journal.define(spec, self._workers)
        for worker in range(self._workers):
            self._presence.expect(worker, self._clock())

    def met(self, worker: int) -> None:
        """The worker waits for the others, before the run begins."""
        self._attendance.met(worker)

    def heard(self, worker: int) -> None:
        """Something arrived from the worker."""
        self._presence.heard(worker, self._clock())

    def asked(self, worker: int) -> None:
        """The main thread of the worker made a request."""
        self._presence.asked(worker, self._clock())

    def pulse(self, worker: int, seen: Seen) -> None:
        """The worker sent a pulse, with the activity of its main thread."""
        self._presence.pulse(worker, seen, self._clock())

    def lose(self, worker: int, incarnation: int, why: Why, seconds: float = 0.0) -> None:
        """The worker has left, or was silent or hung for this many seconds; others stop waiting for it."""
        slot = self.shard_state.slots.get(worker)
        if slot is None or slot.incarnation != incarnation:
            return
        early = self._report_left(worker, why, seconds) and why is Why.DONE
        self._presence.left(worker)
        self._begins.pop(worker, None)
        # Announced pushes are still committed.
        self._shards.leave(worker, incarnation, self._commits.announced(worker, incarnation))
        now = self._clock()
        self._journal.left(worker, now, why, early=early)
        if self._initialiser == worker:
            self._initialiser = None
        self._carry_out(self.coordinator.leave(worker, now))
        self._ask_to_initialise()
        self._tell_drained()

    def _report_left(self, worker: int, why: Why, seconds: float) -> bool:
        doing = self._presence.last_activity(worker, why, seconds, self._clock())
        return self._attendance.left(worker, why, self.coordinator, seconds, doing)

    def drain(self, connection: Connection) -> None:
        """Send `Drained` over this connection when no worker is left."""
        self._attendance.drain(connection)
        self._tell_drained()

    def _tell_drained(self) -> None:
        if not self.shard_state.slots:
            self._attendance.tell_drained()

    # Time passes.

    def look(self) -> None:
        """Give up silent and hanging workers, and record and save what is due; to be called often."""
        now = self._clock()
        self._presence.look(now)
        for worker in self._presence.silent(now):
            self._give_up_silent(worker, now)
        for worker, seconds in self._presence.hanging(self._waited_for(), now):
            self.lose(worker, self.shard_state.slots[worker].incarnation, Why.HUNG, seconds)
        self._report_missing()
        self._saving.look(self._coordinator, now)
        self._journal.tally(now, self._samples)

    def _give_up_silent(self, worker: int, now: float) -> None:
        slot = self.shard_state.slots.get(worker)
        if slot is not None:
            self.lose(worker, slot.incarnation, Why.SILENT, self._heartbeat_seconds)
            return
        self._presence.left(worker)
        if self.coordinator.awaits(worker):
            self._journal.left(worker, now, Why.NEVER_CAME, early=False)
            self._report_left(worker, Why.NEVER_CAME, self._heartbeat_seconds)
            self._carry_out(self.coordinator.leave(worker, now))
            self._ask_to_initialise()

    def _waited_for(self) -> list[int]:
        if self._coordinator is None:
            return []
        waited = self._coordinator.waited_for()
        if self._begins:
            waited += self.shard_state.slots.keys() - self._begins.keys()
        return waited

    def _report_missing(self) -> None:
        if self._coordinator is not None:
            self._attendance.report_missing(self._coordinator.passes.number)

    # A pass.

    def begin(self, worker: int, number: int, epoch: int, ahead: int, costs: PassCosts | None = None) -> None:
        """A worker begins a pass. In a new run, all workers do so before any is answered, so that all take part."""
        if self.shard_state.version < 0:
            self._begins[worker] = (number, epoch, ahead, costs)
            self._ask_to_initialise()
            return
        now = self._clock()
        commands = self.coordinator.begin(worker, number, epoch, now, ahead=ahead, costs=costs)
        self._journal.begun(worker, now, number=number, epoch=epoch, ahead=ahead)
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
        return any(map(self.coordinator.awaits, range(self._workers)))

    def initialised(self, worker: int) -> None:
        """The worker has staged its weights on every shard; the run begins with them."""
        if self.shard_state.version >= 0 or worker != self._initialiser:
            raise ProtocolError(f"worker {worker} sent initial weights without being asked for them")
        self._shards.initialise(worker, self.coordinator.version)
        self._initialiser = None
        # From now on there is always a snapshot to go back to.
        self._saving.write(self._coordinator)
        begins, self._begins = self._begins, {}
        for waiting, begin in sorted(begins.items()):
            try:
                self.begin(waiting, *begin)
            except DisagreementError as error:  # It concerns the waiting worker, not the one that sent the weights.
                self._shards.refuse(waiting, error)

    def push(self, arrival: Arrival, options: Sequence[Options], norm: float) -> None:
        """A worker's push is staged on every shard."""
        key, now = arrival.key, self._clock()
        self._commits.announce(key, options, norm)
        try:
            commands = self.coordinator.push(arrival, now)
        except ProtocolError:
            self._commits.forget(key)
            raise
        self._journal.pushed(arrival, now)
        self._carry_out(commands)

    def more(self, worker: int, ahead: int) -> None:
        """A worker fetches ahead of what it computes."""
        now = self._clock()
        commands = self.coordinator.more(worker, ahead)
        self._journal.fetched_ahead(worker, now, ahead=ahead)
        self._carry_out(commands)

    def rest(self, worker: int, done: int | None, *, ended: bool) -> None:
        """A worker waits for claims, or for the end of the pass."""
        now = self._clock()
        commands = self.coordinator.rest(worker, now, done=done, ended=ended)
        self._journal.rested(worker, now, done=done, ended=ended)
        self._carry_out(commands)

    def stop(self, worker: int) -> None:
        """A worker has left its loop."""
        now = self._clock()
        commands = self.coordinator.stop(worker, now)
        self._journal.stopped(worker, now)
        self._attendance.left_loop(worker, self.coordinator.passes.number)
        self._carry_out(commands)
        self._shards.reply(worker)

    def _carry_out(self, commands: Sequence[CoordinatorCommand]) -> None:
        """Carry out commands.

        Raises:
            BrokenServerError: A command failed. A decision cannot be taken back, so this server must end.
        """
        try:
            for command in commands:
                if isinstance(command, Apply):
                    self._shards.commit(self._commits.make(command))
                elif isinstance(command, Discard):
                    self._shards.discard(command.key)
                    self._commits.forget(command.key)
                elif isinstance(command, Answer):
                    self._answer(command)
                elif isinstance(command, Given):
                    self.shard_state.give(command.worker, command.claims)
                else:
                    self._journal.regrouped(command, self._clock())
        except Exception as error:
            raise BrokenServerError("the servers could not carry out a decision") from error

    def _answer(self, answer: Answer) -> None:
        if answer.over:
            # Before any worker learns of it: a restarted server must not be in the middle of a pass that has ended.
            self._saving.write(self._coordinator)
        self._journal.answered(answer, self._clock())
        slot = self.shard_state.slots.get(answer.worker)
        sizes = None if slot is None else slot.changed_sizes(self.coordinator.sizes.all(), self._workers)
        self._shards.reply(answer.worker, *self._commits.answer(answer, sizes))

    def finish(self) -> None:
        """The servers end: record and save everything, and print the summary."""
        self._report_missing()
        self._journal.tally(self._clock(), self._samples, every=0.0)
        self._saving.write(self._coordinator)
        self._journal.summarise()

    @property
    def _samples(self) -> int:
        return 0 if self._coordinator is None else self._coordinator.samples
