"""Schemes on servers in virtual time: drives the coordinator like a server process and its workers."""

import math
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Final, final

from evenstep.cluster import Stay
from evenstep.cluster.slowness import Chain, Disturbance, Jitter
from evenstep.cluster.slowness.draw import derive_seed
from evenstep.core.coordinate import Answer, Apply, Arrival, Coordinator, CoordinatorCommand
from evenstep.core.errors import ConfigError
from evenstep.core.sync import Regroup
from evenstep.schemes.scheme import NARROWING
from evenstep.sim.log import Log
from evenstep.sim.network import Network
from evenstep.sim.parts import batch_of, batches_in
from evenstep.sim.result import SimulatedRun, SimulatedWorker
from evenstep.sim.scenario import Scenario
from evenstep.sim.served_log import ServedLog
from evenstep.sim.slot import GroupServer, VirtualSlot
from evenstep.sim.worker import NO_REPORT, VirtualWorker
from evenstep.telemetry import events

_ALWAYS: Final = Stay(0.0, math.inf)
_MAX_FRUITLESS_JOINS: Final = 100
"""After this many joins per worker without a commit, a commit is no longer expected."""

Event = tuple[float, int, int, int]
"""Time in seconds, kind, worker, and the incarnation of the worker that it is meant for.

Events are handled in this order. Events whose times are the same float are handled by kind: workers leave, then join,
answers reach workers, workers ask for work, pushes reach servers, computations end; then by rank. In a real run the
order of simultaneous events is arbitrary.
"""

# Plain numbers, because looking up members of an enumeration takes half as long as a whole push.
_LEAVE, _JOIN, _ANSWER, _ASK, _PUSH, _COMPUTED = range(6)


@final
class ServedRun:
    """Workers that compute on claims, and a coordinator that answers their pushes.

    A push reaches the coordinator when all servers have it, and its worker continues when it has the weights of all
    servers. Decisions, and requests without gradients or weights, take no time.
    """

    def __init__(self, scenario: Scenario, log: Log | None) -> None:
        scheme = scenario.scheme
        assert scheme.served is not None
        self._scenario = scenario
        self._coordinator = Coordinator(
            sync=scenario.sync,
            load=scheme.load,
            problem=scenario.problem,
            length=scenario.length,
            drop_last=scenario.drop_last,
        )
        self._network = Network(
            scenario.cluster,
            message_bytes=scenario.message_bytes or 0,
            servers=scheme.served.servers,
            narrowing=NARROWING[scheme.served.wire],
        )
        self._free = self._network.free
        seed = derive_seed(scenario.cluster.seed, "exchange")
        spread = scenario.exchange_spread
        self._exchange: Disturbance = Jitter(spread=spread, seed=seed) if spread else Chain()
        self._overlaps = scheme.served.exchange == "overlapped"
        self._ahead = int(self._overlaps) if scenario.ahead is None else scenario.ahead
        self._minimum = int(scenario.problem.minimum[0])
        self._micro_batch = scheme.micro_batch
        self._costs = scenario.sample_costs()
        self._slots = [VirtualSlot(number, SimulatedWorker(number)) for number in range(len(scenario.cluster))]
        for group in () if self._free else scenario.group_servers:
            server = GroupServer()
            for worker in group:
                self._slots[worker].group = server
        self._reports = log is not None or scenario.uses_reports
        self._log: ServedLog | None = None
        if log is not None:
            self._log = ServedLog(log, scenario, self._coordinator, self._slots, self._network.shard_bytes)
        self._heap: list[Event] = []
        self._fruitless_joins = 0
        self._saved = 0
        """The number of gradient messages saved because several pushes travelled as one."""

    def finish(self) -> SimulatedRun:
        """Run to the end."""
        # By kind of event.
        handlers = (self._leave, self._join, self._receive, self._ask, self._arrive, self._compute_ends)
        heap, slots, coordinator = self._heap, self._slots, self._coordinator
        now, budget = 0.0, self._scenario.samples
        self._start_all()
        while heap and coordinator.samples < budget:
            at, kind, worker, incarnation = heappop(heap)
            slot = slots[worker]
            if incarnation == slot.incarnation:  # Others are meant for an earlier stay of the worker.
                now = at
                handlers[kind](slot, now)
        if not coordinator.samples:
            raise ConfigError(
                "all workers have left before anything was committed: give their [spots.NAME] longer stays"
            )
        if self._log is not None:
            self._log.end(now, saved=self._saved)
        for slot in slots:
            slot.end(now)
        return SimulatedRun(
            scheme=self._scenario.scheme.name,
            global_batch_size=self._scenario.global_batch_size,
            seconds=now,
            samples=coordinator.samples,
            commits=coordinator.version,
            complete=coordinator.samples >= budget,
            workers=tuple(slot.done for slot in slots),
        )

    # Workers come and go.

    def _start_all(self) -> None:
        """All workers that are present at the start join before any of them begins."""
        absent = []
        for slot, spec in zip(self._slots, self._scenario.cluster.workers, strict=True):
            if spec.spot is not None:
                slot.stays = spec.spot.stays(slot.number)
            stay = next(slot.stays, _ALWAYS)
            slot.leaves_at = stay.ends
            if stay.begins > 0.0:
                heappush(self._heap, (stay.begins, _JOIN, slot.number, slot.incarnation))
                absent.append(slot.number)
            else:
                self._come(slot, 0.0)
        for worker in absent:
            self._carry_out(self._coordinator.leave(worker, 0.0), 0.0)
        for slot in self._slots:
            if slot.here_since is not None:
                self._begin(slot, 0, 0.0)

    def _come(self, slot: VirtualSlot, now: float) -> None:
        spec = self._scenario.cluster.workers[slot.number]
        slot.come(now, VirtualWorker(spec, slot.number, self._scenario.scheme, by_cost=self._scenario.told_costs))
        self._coordinator.join(slot.number)
        if slot.group is not None:
            slot.group.bundle.join(slot.number)
        if slot.leaves_at < math.inf:
            heappush(self._heap, (slot.leaves_at, _LEAVE, slot.number, slot.incarnation))
        if self._log is not None:
            self._log.begins(slot, now)

    def _join(self, slot: VirtualSlot, now: float) -> None:
        self._fruitless_joins += 1
        if self._fruitless_joins > _MAX_FRUITLESS_JOINS * len(self._slots):
            raise ConfigError(
                f"nothing was committed while workers joined {self._fruitless_joins} times, because they leave before"
                " they have computed anything: give their [spots.NAME] longer stays, or the workers smaller batches"
            )
        self._come(slot, now)
        self._begin(slot, max(self._coordinator.passes.number, 0), now)

    def _leave(self, slot: VirtualSlot, now: float) -> None:
        slot.go(now)
        stay = next(slot.stays, None)
        if stay is not None:
            slot.leaves_at = stay.ends
            heappush(self._heap, (stay.begins, _JOIN, slot.number, slot.incarnation))
        if self._log is not None:
            self._log.server(events.Left, now, worker=slot.number, why="was taken away")
        if slot.group is not None:
            slot.group.bundle.leave(slot.number)
        self._carry_out(self._coordinator.leave(slot.number, now), now)
        self._pass_on(slot, now)

    # A worker's loop.

    def _begin(self, slot: VirtualSlot, number: int, now: float) -> None:
        """The worker begins a pass; passes and epochs have the same numbers here."""
        slot.epoch = number
        slot.entered = now
        slot.over = False
        if self._log is not None:
            self._log.server(events.Begun, now, worker=slot.number, number=number, epoch=number, ahead=self._ahead)
        self._holds_nothing(slot, now)
        costs = None if self._costs is None or not self._scenario.by_cost else self._costs.of_pass(number)
        self._carry_out(self._coordinator.begin(slot.number, number, number, now, ahead=self._ahead, costs=costs), now)

    def _ask(self, slot: VirtualSlot, now: float) -> None:
        """A worker without claims waits for new ones, or begins the next pass."""
        if slot.over:
            self._begin(slot, slot.epoch + 1, now)
        else:
            if self._log is not None:
                self._log.server(events.Rested, now, worker=slot.number)
            self._holds_nothing(slot, now)
            self._carry_out(self._coordinator.rest(slot.number, now), now)

    def _start(self, slot: VirtualSlot, now: float) -> None:
        """The worker computes on its next claim."""
        if slot.idle_since is not None:
            slot.done.idle_seconds += now - slot.idle_since
            slot.idle_since = None
        claim, slot.claims = slot.claims[0], slot.claims[1:]
        slot.computing = claim
        slot.done.last_batch_size = samples = claim.samples
        slot.load = batch = batch_of(samples, self._minimum)
        amounts = batches_in(batch, self._micro_batch)
        largest = amounts[0]
        if self._costs is not None:
            of_pass = self._costs.of_pass(slot.epoch)
            units = sum(of_pass.between(start, stop) for start, stop in claim.ranges)
            amount = self._costs.samples(batch // samples * units)
            amounts = [amount * (own / batch) for own in amounts]  # Of a period, each batch has its part of the cost.
            if self._scenario.by_cost:
                slot.load, largest = amount, amounts[0]
        slot.handed_out_on = slot.version
        slot.began = now
        if self._log is not None:
            self._log.started(slot, now)
        slot.seconds = seconds = slot.worker.seconds(slot.iterations, amounts, largest)
        slot.iterations += 1
        heappush(self._heap, (now + seconds, _COMPUTED, slot.number, slot.incarnation))

    def _compute_ends(self, slot: VirtualSlot, now: float) -> None:
        slot.computed, slot.computing = slot.computing, None
        slot.blocked_since = now
        if not slot.asking:  # If exchanges overlap with compute, one at a time is under way.
            self._send(slot, now)

    def _send(self, slot: VirtualSlot, now: float) -> None:
        """Push the finished claim; if exchanges overlap with compute, compute meanwhile."""
        claim, slot.computed = slot.computed, None
        assert claim is not None
        samples, seconds, done = claim.samples, slot.seconds, slot.done
        row = slot.worker.row(slot.load, seconds, slot.load) if self._reports else NO_REPORT
        done.samples += samples
        done.iterations = sequence = done.iterations + 1  # Counted over all of its stays.
        done.compute_seconds += seconds
        # Positional arguments take half as long: key, claim, version, samples, units, row.
        key = (slot.number, slot.incarnation, sequence)
        arrival = Arrival(key, claim.number, slot.handed_out_on, samples, samples, row)
        slot.asking = True
        slot.arrived_at = None
        if self._log is not None:
            self._log.sent(slot, arrival, now)
        if self._overlaps:
            slot.entered = now
            slot.blocked_since = None if slot.claims else now
            if slot.claims:
                self._start(slot, now)
        slot.arrival = arrival
        if self._free:
            self._arrive(slot, now)
        elif slot.group is not None:
            slot.group.bundle.push(slot.number, samples, samples)
            self._pass_on(slot, now)
        else:
            arrives = self._network.push_arrives(slot.number, now)
            heappush(self._heap, (arrives, _PUSH, slot.number, slot.incarnation))

    def _holds_nothing(self, slot: VirtualSlot, now: float) -> None:
        """No push needs to wait for this worker's any more."""
        if slot.group is not None:
            slot.group.bundle.ask(slot.number)
            self._pass_on(slot, now)

    def _pass_on(self, slot: VirtualSlot, now: float) -> None:
        """The worker's group server, if any, sends the due pushes as one message."""
        combined = None if slot.group is None else slot.group.bundle.due()
        if combined is None:
            return
        workers = [worker for worker, _ in combined.weights]
        self._saved += len(workers) - 1
        arrives = self._network.push_arrives(workers[0], now)
        for worker in workers:
            heappush(self._heap, (arrives, _PUSH, worker, self._slots[worker].incarnation))

    def _arrive(self, slot: VirtualSlot, now: float) -> None:
        arrival, slot.arrival = slot.arrival, None
        assert arrival is not None
        slot.arrived_at = now
        if self._log is not None:
            self._log.server(
                events.Pushed,
                now,
                worker=slot.number,
                claim=arrival.claim,
                pulled=arrival.version,
                samples=arrival.samples,
                units=arrival.units,
                row=arrival.row,
            )
        self._carry_out(self._coordinator.push(arrival, now), now)

    def _receive(self, slot: VirtualSlot, now: float) -> None:
        """An answer reaches its worker."""
        answer, slot.answer = slot.answer, None
        assert answer is not None
        slot.version = answer.version
        slot.over = answer.over
        slot.claims += answer.claims
        if slot.group is not None:
            slot.group.bundle.answer(slot.number, len(answer.claims), over=answer.over)
        if slot.asking:
            took = slot.end_exchange(answer, now)
            if not self._overlaps:
                slot.entered = now
            if self._log is not None:
                self._log.answered(slot, answer, now, took=took)
        if slot.computed is not None:
            self._send(slot, now)
        elif slot.computing is None:
            if slot.claims:
                self._start(slot, now)
            else:
                slot.idle_since = now if slot.idle_since is None else slot.idle_since
                heappush(self._heap, (now, _ASK, slot.number, slot.incarnation))

    # The servers.

    def _carry_out(self, commands: Sequence[CoordinatorCommand], now: float) -> None:
        """Carry out the commands in order."""
        for command in commands:
            if type(command) is Answer:
                self._send_answer(command, now)
            elif type(command) is Apply:
                self._fruitless_joins, staleness = 0, command.staleness
                for (worker, _, _), _ in command.pushes:
                    slot = self._slots[worker]
                    if self._log is not None:
                        slot.commit = command  # Recorded with the iteration that it commits.
                    slot.staleness += staleness
                    if staleness > slot.done.largest_staleness:
                        slot.done.largest_staleness = staleness
            elif type(command) is Regroup and self._log is not None:
                self._log.server(events.Regrouped, now, groups=command.groups, reason=command.reason)
        if self._log is not None:
            self._log.tally(now, saved=self._saved)

    def _send_answer(self, answer: Answer, now: float) -> None:
        slot = self._slots[answer.worker]
        if slot.here_since is None:
            return
        if self._log is not None or not answer.claims:
            # The server asks for all sizes with every answer; if it has claims, the coordinator has already done so.
            by_worker = self._coordinator.sizes.all()
            if self._log is not None:
                self._log.planned(slot, by_worker)
        here = self._free or (answer.version == slot.version and not answer.whole)
        arrives = now if here else slot.pull_arrives(self._network, answer.version, now, whole=answer.whole)
        if slot.asking and self._scenario.exchange_seconds:
            arrives += self._exchange.seconds(
                worker=slot.number,
                iteration=slot.done.iterations,
                batch_size=0,
                natural_seconds=self._scenario.exchange_seconds,
            )
        slot.answer = answer
        if arrives > now or self._overlaps:  # An overlapping worker may push in turn, which needs a separate event.
            heappush(self._heap, (arrives, _ANSWER, slot.number, slot.incarnation))
        else:
            self._receive(slot, now)
