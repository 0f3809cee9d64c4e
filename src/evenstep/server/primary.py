"""Shard 0: has the coordinator, and sees to it that every shard does what it decides, in the same order."""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast, final

from evenstep.core.account import ServedTotals, served_summary_lines
from evenstep.core.activity import Doing, Seen
from evenstep.core.coordinate import (
    Answer,
    Arrival,
    Coordinator,
    CoordinatorCommand,
    Discard,
    Heartbeats,
    Patience,
    PushKey,
    Update,
)
from evenstep.core.errors import ConfigError, DisagreementError, EvenstepError, ProtocolError
from evenstep.core.supervision import Why
from evenstep.core.sync.rate import clip_factor, commit_step, look_ahead
from evenstep.protocol.optimizer import Options, options_to_record
from evenstep.server.shard.snapshots import Snapshots
from evenstep.server.shard_state import ShardState
from evenstep.telemetry import Recorder
from evenstep.transport.base import Connection, ConnectionLostError, Header

if TYPE_CHECKING:
    from evenstep.core.values import State

_COMPUTE_MICROSECONDS: Final = 1
"""Where a worker's row has them."""
TALLY_SECONDS: Final = 1.0
"""How often the server writes down what it has done."""


@final
class BrokenServerError(EvenstepError):
    """The server's state is not what was decided any more: it must end, and go back to a snapshot."""


@final
class Primary:
    """Decides for all shards; one call at a time.

    Args:
        shard_state: Shard 0's own part.
        workers: How many workers the run has.
        followers: Connections to the other shards, in their order.
        snapshots: Where to find the snapshot to go on from.
        resume: Whether to go on from one.
        snapshot_seconds: How long the run goes on between two snapshots.
        heartbeat_seconds: How long a worker may be silent.
        recorder: Takes events.
        first_incarnation: Where the numbers of incarnations begin: no two servers of a run may give out the same.
        clock: Seconds that do not go back.
        say: Takes a sentence for whoever started the run.
        report: Takes the comings and goings of workers, as events, for the process that watches over the run.
        name_lost: The summary names lost workers.
        drained: What a host is told when no worker is left.
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
        drained: Callable[[], Header] = dict,
    ) -> None:
        self.shard_state = shard_state
        self.workers = workers
        self._followers = followers
        self._snapshots = snapshots
        self._resume = resume
        self._snapshot_seconds = snapshot_seconds
        self._heartbeats = Heartbeats(heartbeat_seconds)
        self._heartbeat_seconds = heartbeat_seconds
        self._patience = Patience()
        self._seen: dict[int, tuple[Seen, float]] = {}
        """What each worker's main thread did at its last pulse, and when that was."""
        self._late_seconds = heartbeat_seconds / 2
        self._looked = clock()
        self.events = 0
        """What has happened so far, counted, so that a worker that waits can tell that the servers get on."""
        self._failing = False
        self._recorder = recorder
        self._clock = clock
        self._say = say
        self._name_lost = name_lost
        self._report = report
        self._drained = drained
        self._coordinator: Coordinator | None = None
        self._incarnation = first_incarnation
        self._options: dict[PushKey, tuple[Options, ...]] = {}
        self._norms: dict[PushKey, float] = {}
        self._commits: dict[int, Update] = {}
        """The latest commit of each worker's push."""
        self._latest: tuple[Options, ...] = ()
        """The options of the latest commit of all, were it no smaller than those that follow."""
        self._lost = 0
        self._message_bytes = 0
        self._initialiser: int | None = None
        self._begins: dict[int, tuple[int, int, int]] = {}
        self._left_loop: dict[int, int] = {}
        """The pass that a worker has left before its end."""
        self._done: dict[int, int] = {}
        """The last pass of each worker that left after its end."""
        self._saved = (clock(), -1)
        self._written: deque[tuple[int, str | None]] = deque()
        """Of snapshots that have been written: the version, and why it failed, if it did."""
        self._tally = _Tally(clock())
        self._totals: ServedTotals | None = None
        self._draining: list[Connection] = []

    @property
    def coordinator(self) -> Coordinator:
        """What decides.

        Raises:
            ProtocolError: Nobody has said yet what the run is.
        """
        if self._coordinator is None:
            raise ProtocolError("a worker asked for something before it said what the run is")
        return self._coordinator

    @property
    def totals(self) -> ServedTotals:
        """What the workers have done so far."""
        assert self._totals is not None
        return self._totals

    # Workers come and go.

    def start(
        self, worker: int, encoded: bytes, connection: Connection, has: int, limit_seconds: float = math.inf
    ) -> int:
        """A worker is here, as a new incarnation, whose number is returned; an older one of its is gone.

        `has` is the version of the weights that it comes with; a later one than the servers' tells what they have lost.
        `limit_seconds` is how long it may keep others waiting without asking for anything.
        """
        self._define(encoded)
        lost = has - self.coordinator.version
        if lost > self._lost:
            said, self._lost = self._lost, lost
            self._record("lost", self._clock(), worker, commits=lost)
            if not said:  # Another worker may know of a few more: one loss is told once.
                self._say(f"{lost} commits are lost: the servers went back from version {has} to {has - lost}")
        if worker in self.shard_state.slots:
            self.lose(worker, self.shard_state.slots[worker].incarnation, Why.AGAIN)
        self._incarnation += 1
        self.shard_state.slot(worker, self._incarnation, connection)
        self.coordinator.join(worker)
        now = self._clock()
        self._heartbeats.heard(worker, now)
        self._patience.joined(worker, limit_seconds)
        self._done.pop(worker, None)
        self._record("join", now, worker, incarnation=self._incarnation)
        self._report({"event": "join", "worker": worker, "limit_seconds": limit_seconds})
        self.totals.joined(worker)
        return self._incarnation

    def met(self, worker: int) -> None:
        """The worker waits for the others, before the run begins."""
        self._report({"event": "meet", "worker": worker})

    def _define(self, encoded: bytes) -> None:
        known = self.shard_state.spec
        spec = self.shard_state.define(encoded, self.workers)
        if known is not None:
            return
        if spec.scheme.served is None:
            raise ConfigError(f"the scheme {spec.scheme.name!r} needs no servers: start none")
        coordinator = Coordinator(
            sync=spec.scheme.sync,
            load=spec.scheme.load,
            problem=spec.problem,
            length=spec.length,
            drop_last=spec.drop_last,
        )
        version = self._snapshots.latest() if self._resume else None
        if version is not None:
            self._tell({"op": "restore", "version": version})
            try:
                state = self.shard_state.restore(version, self.workers)
            except ConfigError:
                self.shard_state.spec = None  # Every worker is to hear of it, not only the first.
                raise
            coordinator.load_state_dict(cast("State", state["coordinator"]))
            self._record("restored", self._clock(), None, version=version)
        self._coordinator = coordinator
        self._totals = ServedTotals(spec.problem.global_batch_size / self.workers)
        self._message_bytes = sum(each.nbytes for each in spec.layout.shards(self.shard_state.count))
        for worker in range(self.workers):
            self._heartbeats.heard(worker, self._clock())

    def heard(self, worker: int) -> None:
        """Something came from the worker."""
        if worker in self.shard_state.slots:
            self._heartbeats.heard(worker, self._clock())

    def asked(self, worker: int) -> None:
        """The worker's main thread asked for something."""
        self.heard(worker)
        self._patience.asked(worker)

    def pulse(self, worker: int, seen: Seen) -> None:
        """The worker lives, and this is what its main thread does."""
        self.heard(worker)
        self._seen[worker] = seen, self._clock()

    def lose(self, worker: int, incarnation: int, why: Why, seconds: float = 0.0) -> None:
        """The worker is gone, dead or done, or was silent or hung for so many seconds; others stop waiting for it."""
        slot = self.shard_state.slots.get(worker)
        if slot is None or slot.incarnation != incarnation:
            return
        early = self._report_leave(worker, why, seconds) and why is Why.DONE
        self._heartbeats.forget(worker)
        self._patience.left(worker)
        self._begins.pop(worker, None)
        self._left_loop.pop(worker, None)
        # What has been announced is still committed.
        announced = [key for key in self._options if key[:2] == (worker, incarnation)]
        self._tell({"op": "leave", "worker": worker, "incarnation": incarnation, "announced": announced})
        self.shard_state.leave(worker, incarnation, announced)
        now = self._clock()
        self._record("leave", now, worker, why=why, early=early)
        self.totals.left(worker, why, early=early)
        if self._initialiser == worker:
            self._initialiser = None
            self._ask_to_initialise()
        self._carry_out(self.coordinator.leave(worker, now))
        self._say_drained()

    def _report_leave(self, worker: int, why: Why, seconds: float) -> bool:
        """Tell the process that watches over the run; `why` decides what it makes of that.

        Returns: Whether it left in the middle of a pass.
        """
        seen, seen_at = self._seen.pop(worker, ("", 0.0))
        if why is Why.HUNG and self._clock() - seen_at >= seconds:
            seen = "nothing was heard from it in that time"
        in_loop = self.coordinator.in_loop(worker) or self._broke_off(worker)
        if why in (Why.DONE, Why.ENDED) and not in_loop:
            self._done[worker] = self.coordinator.number
        about = {"worker": worker, "why": why, "seconds": seconds, "in_loop": in_loop, "doing": str(seen)}
        self._report({"event": "leave", **about})
        return in_loop

    def _broke_off(self, worker: int) -> bool:
        """Whether it has left its loop in the middle of the pass, which still goes on."""
        return self._left_loop.get(worker) == self.coordinator.number and not self.coordinator.over

    def look(self) -> None:
        """Time has passed: give up those who are silent or hang, and write down and save what is due."""
        now = self._clock()
        if now - self._looked > self._late_seconds:
            self._heartbeats.hear_all(now)
            self._patience.start_over()
        self._looked = now
        self._give_up_silent(now)
        self._give_up_hanging(now)
        self._report_missing()
        saved, version = self._saved
        due = now - saved >= self._snapshot_seconds and self.shard_state.version not in (-1, version)
        if due and not self._snapshots.busy:
            self._snapshot(meanwhile=True)
        self._hear_of_snapshots()
        if now - self._tally.since >= TALLY_SECONDS:
            self._write_tally(now)

    def _give_up_silent(self, now: float) -> None:
        for worker in self._heartbeats.silent(now):
            slot = self.shard_state.slots.get(worker)
            if slot is not None and slot.receiving:
                continue  # Its bytes are coming, and have a patience of their own.
            if slot is None:  # It never came, or was heard of at the moment when it left.
                self._heartbeats.forget(worker)
                if self.coordinator.awaits(worker):
                    self._record("leave", now, worker, why=Why.NEVER_CAME)
                    self._report_leave(worker, Why.NEVER_CAME, self._heartbeat_seconds)
                    self._carry_out(self.coordinator.leave(worker, now))
            else:
                self.lose(worker, slot.incarnation, Why.SILENT, self._heartbeat_seconds)

    def _give_up_hanging(self, now: float) -> None:
        for worker in self._patience.exceeded(self._waited_for(), now):
            slot = self.shard_state.slots[worker]
            self.lose(worker, slot.incarnation, Why.HUNG, self._patience.limit_seconds(worker))

    def _waited_for(self) -> list[int]:
        """The workers that others wait for, and that do not say themselves that they wait (for their group, say)."""
        if self._coordinator is None:
            return []
        waited = self._coordinator.waited_for()
        if self._begins and self._initialiser is not None and self._initialiser not in self._begins:
            waited.append(self._initialiser)
        return [worker for worker in waited if not self._says_it_waits(worker)]

    def _says_it_waits(self, worker: int) -> bool:
        slot = self.shard_state.slots.get(worker)
        if slot is None or slot.receiving:
            return True
        return worker in self._seen and self._seen[worker][0].doing is Doing.WAITING

    def tell_when_empty(self, connection: Connection) -> None:
        """Send a message when no worker is here any more."""
        self._draining.append(connection)
        self._say_drained()

    def _say_drained(self) -> None:
        if self.shard_state.slots:
            return
        for connection in self._draining:
            with suppress(ConnectionLostError):
                connection.send({"empty": True, **self._drained()}, wait=False)
        self._draining.clear()

    # A pass.

    def begin(self, worker: int, number: int, epoch: int, ahead: int) -> None:
        """A worker begins a pass; the first one of a new run is asked for its weights before."""
        if self.shard_state.version < 0:
            self._begins[worker] = (number, epoch, ahead)
            self._ask_to_initialise()
            return
        now = self._clock()
        commands = self.coordinator.begin(worker, number, epoch, now, ahead=ahead)
        self._record("begin", now, worker, number=number, epoch=epoch, ahead=ahead)
        self.totals.began(worker, number)
        self._carry_out(commands)

    def _report_missing(self) -> None:
        """The workers that were done before a pass that has begun have missed it."""
        number = -1 if self._coordinator is None else self._coordinator.number
        for worker in [worker for worker, last in self._done.items() if last < number]:
            del self._done[worker]
            self._report({"event": "missing", "worker": worker})

    def initialised(self, worker: int) -> None:
        """The worker has put its weights on every shard: they are the run's."""
        if self.shard_state.version >= 0 or worker != self._initialiser:
            raise ProtocolError(f"worker {worker} sent initial weights that it was not asked for")
        self._tell({"op": "initialise", "worker": worker, "version": self.coordinator.version})
        self.shard_state.initialise(worker, self.coordinator.version)
        self._initialiser = None
        # From here on there is always one to go back to.
        self._snapshot()
        begins, self._begins = self._begins, {}
        for waiting, begin in sorted(begins.items()):
            try:
                self.begin(waiting, *begin)
            except DisagreementError as error:  # It is that worker's own, not the one's who sent weights.
                self._reply(waiting, {"error": str(error), "kind": type(error).__name__})

    def push(self, arrival: Arrival, options: tuple[Options, ...], norm: float) -> None:
        """A worker's push is staged on every shard."""
        key, now = arrival.key, self._clock()
        self._options[key], self._norms[key] = options, norm
        try:
            commands = self.coordinator.push(arrival, now)
        except ProtocolError:
            self._forget(key)
            raise
        self._record(
            "push", now, arrival.worker, claim=arrival.claim, pulled=arrival.version, samples=arrival.samples,
            units=arrival.units, report=arrival.row,
        )  # fmt: skip
        self.totals.pushed(
            arrival.worker, now, samples=arrival.samples, compute_seconds=arrival.row[_COMPUTE_MICROSECONDS] / 1e6
        )
        self._carry_out(commands)

    def rest(self, worker: int) -> None:
        """A worker waits for more."""
        now = self._clock()
        commands = self.coordinator.rest(worker, now)
        self._record("rest", now, worker)
        self._carry_out(commands)

    def stop(self, worker: int) -> None:
        """A worker has left its loop."""
        now = self._clock()
        commands = self.coordinator.stop(worker, now)
        self._record("stop", now, worker)
        self._left_loop[worker] = self.coordinator.number
        self._carry_out(commands)
        self._reply(worker, {"version": self.shard_state.version})

    # In between.

    def _ask_to_initialise(self) -> None:
        """Have one of those who wait send its weights: the lowest rank that is here, once it asks to begin."""
        if self._initialiser is None and self._begins:
            self._initialiser = min(self.shard_state.slots)
        if self._initialiser in self._begins:
            del self._begins[self._initialiser]
            self._reply(self._initialiser, {"initialise": True})

    def _carry_out(self, commands: Sequence[CoordinatorCommand]) -> None:
        """Do what was decided.

        Raises:
            BrokenServerError: It could not be done. What was decided cannot be taken back, so this server is of no use.
        """
        try:
            for command in commands:
                if isinstance(command, Update):
                    self._commit(command)
                elif isinstance(command, Discard):
                    self._tell({"op": "discard", "key": command.key})
                    self.shard_state.discard(command.key)
                    self._forget(command.key)
                elif isinstance(command, Answer):
                    self._answer(command)
                else:
                    self._record(
                        "regroup", self._clock(), None, groups=[list(group) for group in command.groups],
                        reason=command.reason,
                    )  # fmt: skip
        except Exception as error:
            raise BrokenServerError("the servers could not do what was decided") from error

    def _commit(self, update: Update) -> None:
        first = update.pushes[0][0]
        served = cast("Any", self.shard_state.spec).scheme.served
        rate = partial(commit_step, share=update.share, behind=update.behind, rule=served.rate)
        given = self._options[first]
        steps = [rate(each, commits=update.staleness) for each in given]
        self._latest = tuple(cast("Options", rate(each).options) for each in given)
        options = tuple(cast("Options", step.options) for step in steps)
        clip = self._clip_factor(update, served.clip)
        factors = [step.gradient_factor * clip for step in steps]
        compensation = [step.compensation for step in steps]
        if self._followers:
            about = {"pushes": update.pushes, "options": options_to_record(options)}
            self._tell({"op": "commit", **about, "factors": factors, "compensation": compensation})
        messages = self.shard_state.commit(update.pushes, options, factors, compensation)
        self._tally.bytes += messages * self._message_bytes
        for key, _ in update.pushes:
            self._forget(key)
            self._commits[key[0]] = update
        self._tally.commits += 1

    def _clip_factor(self, update: Update, most: float | None) -> float:
        """What to multiply the commit's gradient by, so that its norm over all shards is at most this."""
        if most is None:
            return 1.0
        if len(update.pushes) == 1:
            norm = self._norms[update.pushes[0][0]]
        else:
            norm = self.shard_state.squared_norm(update.pushes) ** 0.5
        return clip_factor(norm, most)

    def _answer(self, answer: Answer) -> None:
        if answer.over:
            # Before anybody hears of it: a server that comes back must not be in the middle of a pass that has ended.
            self._snapshot()
        header: dict[str, object] = {
            "claims": [[claim.number, list(claim.ranges)] for claim in answer.claims],
            "over": answer.over,
            "version": answer.version,
            "pass": self.coordinator.number,
        }
        if answer.release is not None:
            header |= {"lead": answer.release.lead, "bound": answer.release.bound, "held": answer.release.held_seconds}
        held, lead = (0.0, 0) if answer.release is None else (answer.release.held_seconds, answer.release.lead)
        self.totals.answered(answer.worker, self._clock(), held=held, lead=lead, over=answer.over)
        commit = self._commits.pop(answer.worker, None)
        ahead: list[float] = []
        if commit is not None:
            if not answer.over:  # Whoever goes on to evaluate or to save has the weights as they are.
                ahead = self._look_ahead(commit.staleness)
            header |= {"staleness": commit.staleness, "behind": commit.behind, "share": commit.share}
        header |= self._news_of_sizes(answer.worker)
        self._reply(answer.worker, header, ahead)

    def _look_ahead(self, commits: int) -> list[float]:
        """How far on to move each group's weights, for a worker whose last push was stale by so many commits."""
        rate = cast("Any", self.shard_state.spec).scheme.served.rate
        return [look_ahead(options, commits, rule=rate) for options in self._latest] if commits else []

    def _news_of_sizes(self, worker: int) -> Mapping[str, object]:
        """Everybody's planned sizes, where they are others than this worker was told last."""
        slot, sizes = self.shard_state.slots.get(worker), self.coordinator.sizes.all()
        if slot is None or slot.sizes is sizes:
            return {}
        slot.sizes = sizes
        return {"sizes": [sizes.get(each, 0) for each in range(self.workers)]}

    def _reply(self, worker: int, header: Mapping[str, object], ahead: Sequence[float] = ()) -> None:
        """Answer the request that a worker waits on, on every shard."""
        slot = self.shard_state.slots.get(worker)
        if slot is None:
            return
        header = {"answer": slot.sequence, **header}
        if self._followers:
            about = {"worker": worker, "incarnation": slot.incarnation, "answer": slot.sequence, "has": slot.version}
            self._tell({"op": "answer", **about, "ahead": list(ahead)})
        if self.shard_state.answer(worker, header, ahead):
            self._tally.bytes += self._message_bytes

    def _forget(self, key: PushKey) -> None:
        self._options.pop(key, None)
        self._norms.pop(key, None)

    def _tell(self, command: Header) -> None:
        for follower in self._followers:
            follower.send(command)

    # What is kept.

    def finish(self) -> None:
        """The servers end: write down and save the last of it."""
        self._report_missing()
        self._write_tally(self._clock())
        self._snapshot()
        if self._totals is not None and self.shard_state.spec is not None:
            name = self.shard_state.spec.scheme.name
            for line in served_summary_lines(self._totals, name, name_lost=self._name_lost):
                self._say(line)

    def _snapshot(self, *, meanwhile: bool = False) -> None:
        """Have a snapshot written on every shard, unless this version has one.

        With `meanwhile` the run goes on while it is written; else it is on the disk of this server afterwards.
        """
        version, written = self.shard_state.version, self._written
        if self._coordinator is not None and version not in (-1, self._saved[1]):
            self._tell({"op": "snapshot_meanwhile" if meanwhile else "snapshot"})
            self._saved = (self._clock(), version)
            beside = {"coordinator": self._coordinator.state_dict()}
            self.shard_state.snapshot(lambda why: written.append((version, why)), meanwhile=meanwhile, **beside)
        if not meanwhile:
            self._snapshots.wait()
            self._hear_of_snapshots()

    def _hear_of_snapshots(self) -> None:
        """Tell what has become of those that were to be written."""
        while self._written:
            version, failure = self._written.popleft()
            if failure is None:
                self._record("snapshot", self._clock(), None, version=version)
            elif not self._failing:
                self._say(f"no snapshot can be written ({failure}): a server that dies now loses what it has")
                self._record("snapshot_failed", self._clock(), None, version=version, text=failure)
            self._failing = failure is not None

    def _record(self, event: str, now: float, worker: int | None, **more: object) -> None:
        """Write an event down. What the coordinator is told is written down with the very time that it is told."""
        self.events += 1
        about = {} if worker is None else {"worker": worker}
        self._recorder.record({"event": event, "at": now, "version": self.shard_state.version, **about, **more})

    def _write_tally(self, now: float) -> None:
        tally, self._tally = self._tally, _Tally(now)
        if tally.commits:
            samples = self.coordinator.samples
            self._record(
                "tally", now, None, seconds=now - tally.since, commits=tally.commits, bytes=tally.bytes, samples=samples
            )


@final
class _Tally:
    """What has been done since a time."""

    def __init__(self, since: float) -> None:
        self.since = since
        self.commits = 0
        self.bytes = 0
