"""Schemes on servers in virtual time: drives the coordinator as the server process and its workers do."""

from collections.abc import Callable, Sequence
from typing import Final, final

from evenstep.cluster.slowness import Jitter
from evenstep.cluster.slowness.draw import derive_seed
from evenstep.core.coordinate import Answer, Arrival, Coordinator, CoordinatorCommand, Update
from evenstep.core.errors import ConfigError
from evenstep.core.sync import Regroup
from evenstep.sim.group_server import GroupServer
from evenstep.sim.log import TALLY_SECONDS, Log
from evenstep.sim.network import Network
from evenstep.sim.queue import Events, Kind
from evenstep.sim.result import SimulatedRun
from evenstep.sim.scenario import Scenario
from evenstep.sim.worker import VirtualWorker, batch_of, rests_on_estimates
from evenstep.sim.worker_slot import Pushed, WorkerSlot

_PROGRESS_EVERY: Final = 4096
_PATIENCE: Final = 100
"""So many arrivals of each worker without a commit in between mean that there will be none."""

# As plain numbers: to look up members of an enumeration takes as long as half of what a push takes.
_LEAVE, _JOIN, _ANSWER, _ASK, _PUSH, _COMPUTED = map(int, Kind)


@final
class ServedRun:
    """Workers that compute on claims, and a coordinator that answers their pushes.

    A push reaches the coordinator when all servers have it, and its worker goes on when all servers' weights have
    reached it. Requests without gradients or weights take no time, and neither do decisions.
    """

    def __init__(self, scenario: Scenario, log: Log | None) -> None:
        scheme = scenario.scheme
        assert scheme.served is not None
        self._scenario = scenario
        self._log = log
        self._coordinator = Coordinator(
            sync=scenario.sync,
            load=scheme.load,
            problem=scenario.problem,
            length=scenario.length,
            drop_last=scenario.drop_last,
        )
        self._network = Network(
            scenario.cluster, message_bytes=scenario.message_bytes or 0, servers=scheme.served.servers
        )
        self._free = self._network.free
        self._behind: dict[int, GroupServer] = {}
        """The group server that a worker pushes to, of those that have one, where that makes a difference."""
        if not self._free:
            for group in scenario.group_servers:
                self._behind |= dict.fromkeys(group, GroupServer())
        self._exchange_seconds = scenario.exchange_seconds
        self._exchange_jitter = Jitter(
            spread=scenario.exchange_spread, seed=derive_seed(scenario.cluster.seed, "exchange")
        )
        self._overlaps = scheme.served.exchange == "overlapped"
        self._ahead = int(self._overlaps) if scenario.ahead is None else scenario.ahead
        self._estimates = log is not None or rests_on_estimates(scheme.load)
        self._minimum = int(scenario.problem.minimum[0])
        self._budget = scenario.samples
        self._slots = [WorkerSlot(number) for number in range(len(scenario.cluster))]
        self._events = Events()
        self._now = 0.0
        self._arrivals_in_vain = 0
        self._sizes: dict[int, list[int]] = {}
        """What each worker has heard of everybody's sizes, where it is written down."""
        self._tallied = (0.0, 0, 0)
        self._spared = 0
        """Messages of gradients that were never sent, since several pushes travelled as one."""
        self._handlers: tuple[Callable[[WorkerSlot, float], None], ...] = (
            self._leave,
            self._join,
            self._take,
            self._ask,
            self._arrive,
            self._compute_ends,
        )
        """By `Kind`."""

    def finish(self, progress: Callable[[float], None]) -> SimulatedRun:
        """Run to the end; `progress` is told now and then which part is done."""
        self._gather()
        heap, pop, slots, handlers = self._events.heap, self._events.pop, self._slots, self._handlers
        handled, coordinator, budget = 0, self._coordinator, self._budget
        while heap and coordinator.samples < budget:
            now, kind, worker, incarnation = pop()
            slot = slots[worker]
            if incarnation != slot.incarnation:
                continue  # It was meant for one that is gone.
            self._now = now
            handlers[kind](slot, now)
            handled += 1
            if not handled % _PROGRESS_EVERY:
                progress(coordinator.samples / budget)
        return self._result()

    # Workers come and go.

    def _gather(self) -> None:
        """Those who are there from the beginning have all come before any begins."""
        absent = []
        for slot, spec in zip(self._slots, self._scenario.cluster.workers, strict=True):
            if spec.spot is not None:
                slot.stays = spec.spot.stays(slot.number)
                stay = next(slot.stays)
                if stay.begins > 0.0:
                    self._events.add((stay.begins, _JOIN, slot.number, slot.incarnation))
                    slot.leaves_at = stay.ends
                    absent.append(slot.number)
                    continue
                slot.leaves_at = stay.ends
            self._come(slot, 0.0)
        for worker in absent:
            self._carry_out(self._coordinator.leave(worker, 0.0), 0.0)
        for slot in self._slots:
            if slot.here_since is not None:
                self._begin(slot, 0, 0.0)

    def _come(self, slot: WorkerSlot, now: float) -> None:
        spec = self._scenario.cluster.workers[slot.number]
        slot.come(now, VirtualWorker(spec, slot.number, self._scenario.scheme, estimates=self._estimates))
        self._coordinator.join(slot.number)
        if slot.number in self._behind:
            self._behind[slot.number].bundle.join(slot.number)
        if slot.leaves_at is not None:
            self._events.add((slot.leaves_at, _LEAVE, slot.number, slot.incarnation))
        if self._log is not None:
            self._log.run(slot.number, self._scenario)
            self._log.served("join", now, self._coordinator.version, worker=slot.number, incarnation=slot.incarnation)

    def _join(self, slot: WorkerSlot, now: float) -> None:
        self._arrivals_in_vain += 1
        if self._arrivals_in_vain > _PATIENCE * len(self._slots):
            raise ConfigError(
                f"nothing has been committed for {self._arrivals_in_vain} arrivals of workers, which leave before they"
                " have computed anything: give their [spots.NAME] longer stays, or the workers smaller batches"
            )
        self._come(slot, now)
        self._begin(slot, max(self._coordinator.number, 0), now)

    def _leave(self, slot: WorkerSlot, now: float) -> None:
        slot.go(now)
        stay = next(slot.stays, None)
        if stay is not None:
            slot.leaves_at = stay.ends
            self._events.add((stay.begins, _JOIN, slot.number, slot.incarnation))
        if self._log is not None:
            self._log.served("leave", now, self._coordinator.version, worker=slot.number, why="was taken away")
        if slot.number in self._behind:
            self._behind[slot.number].bundle.leave(slot.number)
        self._carry_out(self._coordinator.leave(slot.number, now), now)
        self._pass_on(slot, now)

    # A worker's loop.

    def _begin(self, slot: WorkerSlot, number: int, now: float) -> None:
        """The worker begins the pass of that number; passes and epochs have the same numbers here."""
        slot.epoch = number
        slot.entered = now
        slot.over = False
        self._heard("begin", slot, now, number=number, epoch=number, ahead=self._ahead)
        self._holds_nothing(slot, now)
        self._carry_out(self._coordinator.begin(slot.number, number, number, now, ahead=self._ahead), now)

    def _ask(self, slot: WorkerSlot, now: float) -> None:
        """The worker has nothing: it waits for claims, or goes on with the next pass."""
        if slot.over:
            self._begin(slot, slot.epoch + 1, now)
        else:
            self._heard("rest", slot, now)
            self._holds_nothing(slot, now)
            self._carry_out(self._coordinator.rest(slot.number, now), now)

    def _start(self, slot: WorkerSlot, now: float) -> None:
        """The worker computes on its next claim."""
        if slot.idle_since is not None:
            slot.idle_seconds += now - slot.idle_since
            slot.idle_since = None
        claim = slot.computing = slot.claims.popleft()
        samples = slot.last_batch_size = claim.samples
        slot.batch = batch = samples if samples >= self._minimum else batch_of(samples, self._minimum)
        slot.handed_out_on = slot.version
        slot.began = now
        assert slot.worker is not None
        if self._log is not None:
            slowness = slot.worker.news.of(slot.iterations)
            if slowness is not None:
                self._log.disturbance(slot.number, slot.iterations, now, slowness)
        slot.seconds = seconds = slot.worker.seconds(slot.iterations, batch, now)
        slot.iterations += 1
        self._events.add((now + seconds, _COMPUTED, slot.number, slot.incarnation))

    def _compute_ends(self, slot: WorkerSlot, now: float) -> None:
        slot.computed, slot.computing = slot.computing, None
        slot.blocked_since = now
        if not slot.asking:  # Where exchanges overlap with compute, one at a time is under way.
            self._send(slot, now)

    def _send(self, slot: WorkerSlot, now: float) -> None:
        """Push what was computed; where exchanges overlap, go on meanwhile."""
        claim, slot.computed = slot.computed, None
        assert claim is not None
        assert slot.worker is not None
        samples, batch, seconds = slot.last_batch_size, slot.batch, slot.seconds
        row = slot.worker.row(batch, seconds, batch)
        slot.samples += samples
        slot.pushes = sequence = slot.pushes + 1  # Which go up over all of its stays.
        # In order and not by name, which takes twice as long: key, claim, version, samples, units, row.
        key = (slot.number, slot.incarnation, sequence)
        arrival = Arrival(key, claim.number, slot.handed_out_on, samples, samples, row)
        slot.compute_seconds += seconds
        slot.asking = True
        slot.arrived_at = None
        if self._log is not None:
            slot.pushed = Pushed(
                number=slot.iterations - 1, samples=samples, entered=slot.entered, began=slot.began, row=row
            )
        if self._overlaps:
            self._go_on_meanwhile(slot, now)
        slot.arrival = arrival
        if self._free:
            self._arrive(slot, now)
        elif slot.number in self._behind:
            self._behind[slot.number].bundle.push(slot.number, samples, samples)
            self._pass_on(slot, now)
        else:
            arrives = self._network.push_arrives(slot.number, now)
            self._events.add((arrives, _PUSH, slot.number, slot.incarnation))

    def _holds_nothing(self, slot: WorkerSlot, now: float) -> None:
        """Nobody's push waits for this worker's any more."""
        if slot.number in self._behind:
            self._behind[slot.number].bundle.ask(slot.number)
            self._pass_on(slot, now)

    def _pass_on(self, slot: WorkerSlot, now: float) -> None:
        """The server of the worker's group sends what is due, in one message; nothing where it has none."""
        group = self._behind.get(slot.number)
        together = None if group is None else group.bundle.due()
        if together is None:
            return
        workers = [worker for worker, _ in together.weights]
        self._spared += len(workers) - 1
        arrives = self._network.push_arrives(workers[0], now)
        for worker in workers:
            self._events.add((arrives, _PUSH, worker, self._slots[worker].incarnation))

    def _pull_arrives(self, worker: int, version: int, now: float) -> float:
        """When the weights of this version, sent now, have reached the worker, of whose group only one is sent them."""
        group = self._behind.get(worker)
        if group is None:
            return self._network.pull_arrives(worker, now)
        if group.version != version:
            group.version, group.arrives = version, self._network.pull_arrives(worker, now)
        return max(now, group.arrives)

    def _go_on_meanwhile(self, slot: WorkerSlot, now: float) -> None:
        """The push is under way: compute on what is in hand, or wait."""
        if slot.pushed is not None:
            slot.pushed.ended = now
        slot.entered = now
        if slot.claims:
            slot.blocked_since = None
            self._start(slot, now)
        else:
            slot.blocked_since = now

    def _arrive(self, slot: WorkerSlot, now: float) -> None:
        arrival = slot.arrival
        assert arrival is not None
        slot.arrived_at = now
        if self._log is not None:
            self._heard(
                "push", slot, now, claim=arrival.claim, pulled=arrival.version, samples=arrival.samples,
                units=arrival.units, report=arrival.row,
            )  # fmt: skip
        self._carry_out(self._coordinator.push(arrival, now), now)

    def _take(self, slot: WorkerSlot, now: float) -> None:
        """The answer that was on its way has reached its worker."""
        answer, slot.answer = slot.answer, None
        assert answer is not None
        self._receive(slot, answer, now)

    def _receive(self, slot: WorkerSlot, answer: Answer, now: float) -> None:
        slot.version = answer.version
        slot.over = answer.over
        slot.claims.extend(answer.claims)
        if slot.number in self._behind:
            self._behind[slot.number].bundle.answer(slot.number, len(answer.claims), over=answer.over)
        if slot.asking:
            self._end_exchange(slot, answer, now)
        if slot.computed is not None:
            self._send(slot, now)
        elif slot.computing is None:
            if slot.claims:
                self._start(slot, now)
            else:
                slot.idle_since = now if slot.idle_since is None else slot.idle_since
                self._events.add((now, _ASK, slot.number, slot.incarnation))

    def _end_exchange(self, slot: WorkerSlot, answer: Answer, now: float) -> None:
        """Count what the exchange took, as far as its worker waited for it."""
        slot.asking = False
        took, since, release = 0.0, slot.blocked_since, answer.release
        if since is not None:
            took = now - since
            slot.blocked_since = None
        if release is not None:
            if took:
                waited = min(release.held_seconds, took)
                slot.wait_seconds += waited
                slot.comm_seconds += took - waited
            lead = release.lead
            if lead > slot.largest_lead:
                slot.largest_lead = lead
        else:
            slot.comm_seconds += took
        if not self._overlaps:
            slot.entered = now
        if self._log is not None and slot.pushed is not None:
            slot.pushed.synchronised = took
            slot.write(self._log, now, answer)

    # The servers.

    def _heard(self, event: str, slot: WorkerSlot, now: float, **more: object) -> None:
        """Write down what reaches the coordinator, as a server does."""
        if self._log is not None:
            self._log.served(event, now, self._coordinator.version, worker=slot.number, **more)

    def _carry_out(self, commands: Sequence[CoordinatorCommand], now: float) -> None:
        """Do what was decided, in its order."""
        for command in commands:
            if type(command) is Answer:
                self._send_answer(command, now)
            elif type(command) is Update:
                self._commit(command)
            elif type(command) is Regroup and self._log is not None:
                groups = [list(group) for group in command.groups]
                self._log.served("regroup", now, self._coordinator.version, groups=groups, reason=command.reason)
        if self._log is not None and now - self._tallied[0] >= TALLY_SECONDS:
            self._write_tally(now)

    def _commit(self, update: Update) -> None:
        self._arrivals_in_vain = 0
        staleness = update.staleness
        for (worker, _, _), _ in update.pushes:
            slot = self._slots[worker]
            slot.commit = update  # To be written down with the iteration that it commits.
            slot.staleness += staleness
            if staleness > slot.largest_staleness:
                slot.largest_staleness = staleness

    def _send_answer(self, answer: Answer, now: float) -> None:
        worker = answer.worker
        slot = self._slots[worker]
        if slot.here_since is None:
            return
        if self._log is not None or not answer.claims:
            # As the server does, which asks for everybody's sizes with every answer; with claims that has been done.
            self._plan(slot)
        # Weights that the worker has already are not sent again.
        here = self._free or answer.version == slot.version
        arrives = now if here else self._pull_arrives(worker, answer.version, now)
        if slot.asking:
            arrives += self._exchange_takes(slot)
        if arrives > now or self._overlaps:  # Whose worker may push in turn, which has to wait for the next event.
            slot.answer = answer
            self._events.add((arrives, _ANSWER, worker, slot.incarnation))
        else:
            self._receive(slot, answer, now)

    def _exchange_takes(self, slot: WorkerSlot) -> float:
        if not self._exchange_jitter.spread:
            return self._exchange_seconds
        return self._exchange_jitter.seconds(
            worker=slot.number, iteration=slot.pushes, batch_size=0, natural_seconds=self._exchange_seconds, now=0.0
        )

    def _plan(self, slot: WorkerSlot) -> None:
        planned = self._coordinator.sizes
        by_worker = planned.all() if planned.members else {}
        if self._log is None:
            return
        sizes = [by_worker.get(worker, 0) for worker in range(len(self._slots))]
        if sizes != self._sizes.get(slot.number):
            self._sizes[slot.number] = sizes
            self._log.plan(slot.number, slot.iterations, sizes)

    def _write_tally(self, now: float) -> None:
        assert self._log is not None
        since, commits, pushes = self._tallied
        version = self._coordinator.version
        pushed = sum(slot.pushes for slot in self._slots) - self._spared
        self._tallied = (now, version, pushed)
        if version == commits:
            return
        size = self._network.shard_bytes
        self._log.served(
            "tally",
            now,
            version,
            seconds=now - since,
            commits=version - commits,
            bytes=round((pushed - pushes) * size),
            samples=self._coordinator.samples,
        )

    def _result(self) -> SimulatedRun:
        coordinator = self._coordinator
        if not coordinator.samples:
            raise ConfigError(
                "all workers have left before anything was committed: give their [spots.NAME] longer stays"
            )
        if self._log is not None:
            for slot in self._slots:
                if slot.here_since is not None:
                    self._log.end(slot.number, self._now)
            self._write_tally(self._now)
        for slot in self._slots:
            slot.end(self._now)
        return SimulatedRun(
            scheme=self._scenario.scheme.name,
            global_batch_size=self._scenario.global_batch_size,
            seconds=self._now,
            samples=coordinator.samples,
            commits=coordinator.version,
            complete=coordinator.samples >= self._budget,
            workers=tuple(slot.result() for slot in self._slots),
        )
