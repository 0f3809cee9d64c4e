"""Schemes on servers in virtual time: drives the coordinator as a server process and its workers do."""

import math
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Final, final

from evenstep.cluster import Stay
from evenstep.cluster.slowness import Disturbance, Jitter, Undisturbed
from evenstep.cluster.slowness.draw import derive_seed
from evenstep.core.coordinate import Answer, Apply, Arrival, Coordinator, CoordinatorCommand
from evenstep.core.errors import ConfigError
from evenstep.core.samples.claims import Claim
from evenstep.core.samples.pass_costs import PassCosts
from evenstep.core.sync import Regroup
from evenstep.sim.costs import SampleCosts
from evenstep.sim.log import Log
from evenstep.sim.network import Network
from evenstep.sim.result import SimulatedRun
from evenstep.sim.scenario import Scenario
from evenstep.sim.served_log import ServedLog
from evenstep.sim.worker import VirtualWorker, batch_of
from evenstep.sim.worker_slot import GroupServer, WorkerSlot

_PROGRESS_EVERY: Final = 4096
_ALWAYS: Final = Stay(0.0, math.inf)
_MAX_FRUITLESS_JOINS: Final = 100
"""Joins per worker without a commit, after which a commit is no longer expected."""

Event = tuple[float, int, int, int]
"""Its time in seconds, its kind, its worker, and the worker's incarnation that it is for.

Events are handled in this order. Simultaneous events, whose times are the same float, are handled by kind: workers
leave, then join, answers reach workers, workers ask for work, pushes reach servers, computations end; then by rank. In
a real run their order is arbitrary.
"""

# Plain numbers: to look up members of an enumeration takes half as long as a whole push.
_LEAVE, _JOIN, _ANSWER, _ASK, _PUSH, _COMPUTED = range(6)


def run_served(scenario: Scenario, log: Log | None, progress: Callable[[float], None]) -> SimulatedRun:
    """Run to the end; `progress` is called from time to time with the part that is done."""
    run = _ServedRun(scenario, log)
    run.start()
    heap, slots, handlers, coordinator = run.heap, run.slots, run.handlers, run.coordinator
    now, handled, budget = 0.0, 0, scenario.samples
    while heap and coordinator.samples < budget:
        at, kind, worker, incarnation = heappop(heap)
        slot = slots[worker]
        if incarnation != slot.incarnation:
            continue  # It was meant for an earlier stay of the worker.
        now = at
        handlers[kind](slot, now)
        handled += 1
        if not handled % _PROGRESS_EVERY:
            progress(coordinator.samples / budget)
    if not coordinator.samples:
        raise ConfigError("all workers have left before anything was committed: give their [spots.NAME] longer stays")
    if run.log is not None:
        run.log.end(now, saved=run.saved)
    for slot in slots:
        slot.end(now)
    return SimulatedRun(
        scheme=scenario.scheme.name,
        global_batch_size=scenario.global_batch_size,
        seconds=now,
        samples=coordinator.samples,
        commits=coordinator.version,
        complete=coordinator.samples >= budget,
        workers=tuple(slot.result() for slot in slots),
    )


@final
class _ServedRun:
    """Workers that compute on claims, and a coordinator that answers their pushes.

    A push reaches the coordinator when all servers have it, and its worker continues when it has the weights of all
    servers. Requests without gradients or weights take no time, and neither do decisions.
    """

    def __init__(self, scenario: Scenario, log: Log | None) -> None:
        scheme = scenario.scheme
        assert scheme.served is not None
        self._scenario = scenario
        self.coordinator = Coordinator(
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
        seed = derive_seed(scenario.cluster.seed, "exchange")
        spread = scenario.exchange_spread
        self._exchange: Disturbance = Jitter(spread=spread, seed=seed) if spread else Undisturbed()
        self._overlaps = scheme.served.exchange == "overlapped"
        self._ahead = int(self._overlaps) if scenario.ahead is None else scenario.ahead
        self._minimum = int(scenario.problem.minimum[0])
        self._costs = scenario.sample_costs()
        self._pass: tuple[int, PassCosts] | None = None
        self.slots = _slots(scenario, grouped=not self._free)
        self.log: ServedLog | None = None
        if log is not None:
            self.log = ServedLog(log, scenario, self.coordinator, self.slots, self._network.shard_bytes)
        self.heap: list[Event] = []
        self._fruitless_joins = 0
        self.saved = 0
        """Messages of gradients that were saved because several pushes travelled as one."""
        self.handlers: tuple[Callable[[WorkerSlot, float], None], ...] = (
            self._leave,
            self._join,
            self._receive,
            self._ask,
            self._arrive,
            self._compute_ends,
        )
        """By kind of event."""

    def start(self) -> None:
        """All workers that are there at the beginning join before any of them begins."""
        absent = []
        for slot, spec in zip(self.slots, self._scenario.cluster.workers, strict=True):
            if spec.spot is not None:
                slot.stays = spec.spot.stays(slot.number)
            stay = next(slot.stays, _ALWAYS)
            slot.leaves_at = stay.ends
            if stay.begins > 0.0:
                heappush(self.heap, (stay.begins, _JOIN, slot.number, slot.incarnation))
                absent.append(slot.number)
            else:
                self._come(slot, 0.0)
        for worker in absent:
            self._carry_out(self.coordinator.leave(worker, 0.0), 0.0)
        for slot in self.slots:
            if slot.here_since is not None:
                self._begin(slot, 0, 0.0)

    # Workers come and go.

    def _come(self, slot: WorkerSlot, now: float) -> None:
        spec = self._scenario.cluster.workers[slot.number]
        slot.come(now, VirtualWorker(spec, slot.number, self._scenario.scheme))
        self.coordinator.join(slot.number)
        if slot.group is not None:
            slot.group.bundle.join(slot.number)
        if slot.leaves_at < math.inf:
            heappush(self.heap, (slot.leaves_at, _LEAVE, slot.number, slot.incarnation))
        if self.log is not None:
            self.log.joined(slot, now)

    def _join(self, slot: WorkerSlot, now: float) -> None:
        self._fruitless_joins += 1
        if self._fruitless_joins > _MAX_FRUITLESS_JOINS * len(self.slots):
            raise ConfigError(
                f"nothing was committed while workers joined {self._fruitless_joins} times, because they leave before"
                " they have computed anything: give their [spots.NAME] longer stays, or the workers smaller batches"
            )
        self._come(slot, now)
        self._begin(slot, max(self.coordinator.passes.number, 0), now)

    def _leave(self, slot: WorkerSlot, now: float) -> None:
        slot.go(now)
        stay = next(slot.stays, None)
        if stay is not None:
            slot.leaves_at = stay.ends
            heappush(self.heap, (stay.begins, _JOIN, slot.number, slot.incarnation))
        if self.log is not None:
            self.log.left(slot, now)
        if slot.group is not None:
            slot.group.bundle.leave(slot.number)
        self._carry_out(self.coordinator.leave(slot.number, now), now)
        self._pass_on(slot, now)

    # A worker's loop.

    def _begin(self, slot: WorkerSlot, number: int, now: float) -> None:
        """The worker begins a pass; passes and epochs have the same numbers here."""
        slot.epoch = number
        slot.entered = now
        slot.over = False
        if self.log is not None:
            self.log.began(slot, now, ahead=self._ahead)
        self._holds_nothing(slot, now)
        costs = self._costs_of_pass(number) if self._scenario.by_cost else None
        self._carry_out(self.coordinator.begin(slot.number, number, number, now, ahead=self._ahead, costs=costs), now)

    def _costs_of_pass(self, number: int) -> PassCosts | None:
        if self._costs is None:
            return None
        if self._pass is None or self._pass[0] != number:
            self._pass = number, self._costs.of_pass(number)
        return self._pass[1]

    def _ask(self, slot: WorkerSlot, now: float) -> None:
        """A worker without claims waits for some, or begins the next pass."""
        if slot.over:
            self._begin(slot, slot.epoch + 1, now)
        else:
            if self.log is not None:
                self.log.rested(slot, now)
            self._holds_nothing(slot, now)
            self._carry_out(self.coordinator.rest(slot.number, now), now)

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
        if self.log is not None:
            self.log.started(slot, now)
        if self._costs is None:
            seconds = slot.worker.seconds(slot.iterations, batch, now)
        else:
            cost, by_cost = self._cost_of(claim, batch // samples, slot.epoch, self._costs), self._scenario.by_cost
            slot.cost = cost if by_cost else None
            size = None if by_cost else batch
            seconds = slot.worker.cost_seconds(slot.iterations, (cost,), now, batch_size=size)
        slot.seconds = seconds
        slot.iterations += 1
        heappush(self.heap, (now + seconds, _COMPUTED, slot.number, slot.incarnation))

    def _cost_of(self, claim: Claim, copies: int, number: int, costs: SampleCosts) -> float:
        """What a claim costs, in average samples."""
        of_pass = self._costs_of_pass(number)
        assert of_pass is not None
        return costs.samples(copies * sum(of_pass.between(start, stop) for start, stop in claim.ranges))

    def _compute_ends(self, slot: WorkerSlot, now: float) -> None:
        slot.computed, slot.computing = slot.computing, None
        slot.blocked_since = now
        if not slot.asking:  # Where exchanges overlap with compute, one at a time is under way.
            self._send(slot, now)

    def _send(self, slot: WorkerSlot, now: float) -> None:
        """Push what was computed; if exchanges overlap with compute, compute meanwhile."""
        claim, slot.computed = slot.computed, None
        assert claim is not None
        assert slot.worker is not None
        samples, batch, seconds = slot.last_batch_size, slot.batch, slot.seconds
        cost = slot.cost
        row = slot.worker.row(batch, seconds, batch) if cost is None else slot.worker.cost_row(cost, seconds, cost)
        slot.samples += samples
        slot.pushes = sequence = slot.pushes + 1  # Counted over all of its stays.
        # Positional arguments, which take half as long: key, claim, version, samples, units, row.
        key = (slot.number, slot.incarnation, sequence)
        arrival = Arrival(key, claim.number, slot.handed_out_on, samples, samples, row)
        slot.compute_seconds += seconds
        slot.asking = True
        slot.arrived_at = None
        if self.log is not None:
            self.log.sent(slot, arrival)
        if self._overlaps:
            self._go_on_meanwhile(slot, now)
        slot.arrival = arrival
        if self._free:
            self._arrive(slot, now)
        elif slot.group is not None:
            slot.group.bundle.push(slot.number, samples, samples)
            self._pass_on(slot, now)
        else:
            arrives = self._network.push_arrives(slot.number, now)
            heappush(self.heap, (arrives, _PUSH, slot.number, slot.incarnation))

    def _holds_nothing(self, slot: WorkerSlot, now: float) -> None:
        """No push waits for this worker's any more."""
        if slot.group is not None:
            slot.group.bundle.ask(slot.number)
            self._pass_on(slot, now)

    def _pass_on(self, slot: WorkerSlot, now: float) -> None:
        """The worker's group server, if any, sends the pushes that are due as one message."""
        combined = None if slot.group is None else slot.group.bundle.due()
        if combined is None:
            return
        workers = [worker for worker, _ in combined.weights]
        self.saved += len(workers) - 1
        arrives = self._network.push_arrives(workers[0], now)
        for worker in workers:
            heappush(self.heap, (arrives, _PUSH, worker, self.slots[worker].incarnation))

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
        if self.log is not None:
            self.log.arrived(slot, arrival, now)
        self._carry_out(self.coordinator.push(arrival, now), now)

    def _receive(self, slot: WorkerSlot, now: float) -> None:
        """An answer reaches its worker."""
        answer, slot.answer = slot.answer, None
        assert answer is not None
        slot.version = answer.version
        slot.over = answer.over
        slot.claims.extend(answer.claims)
        if slot.group is not None:
            slot.group.bundle.answer(slot.number, len(answer.claims), over=answer.over)
        if slot.asking:
            took = slot.end_exchange(answer, now)
            if not self._overlaps:
                slot.entered = now
            if self.log is not None:
                self.log.answered(slot, answer, now, took=took)
        if slot.computed is not None:
            self._send(slot, now)
        elif slot.computing is None:
            if slot.claims:
                self._start(slot, now)
            else:
                slot.idle_since = now if slot.idle_since is None else slot.idle_since
                heappush(self.heap, (now, _ASK, slot.number, slot.incarnation))

    # The servers.

    def _carry_out(self, commands: Sequence[CoordinatorCommand], now: float) -> None:
        """Do what was decided, in its order."""
        for command in commands:
            if type(command) is Answer:
                self._send_answer(command, now)
            elif type(command) is Apply:
                self._commit(command)
            elif type(command) is Regroup and self.log is not None:
                self.log.regrouped(command, now)
        if self.log is not None:
            self.log.tally(now, saved=self.saved)

    def _commit(self, update: Apply) -> None:
        self._fruitless_joins = 0
        for (worker, _, _), _ in update.pushes:
            slot = self.slots[worker]
            slot.commit = update  # To be written down with the iteration that it commits.
            slot.staleness += update.staleness
            slot.largest_staleness = max(slot.largest_staleness, update.staleness)

    def _send_answer(self, answer: Answer, now: float) -> None:
        slot = self.slots[answer.worker]
        if slot.here_since is None:
            return
        if self.log is not None or not answer.claims:
            # The server asks for all sizes with every answer; with claims the coordinator has done so already.
            by_worker = self.coordinator.sizes.all()
            if self.log is not None:
                self.log.planned(slot, by_worker)
        # Weights that the worker has already are not sent again.
        here = self._free or answer.version == slot.version
        arrives = now if here else slot.pull_arrives(self._network, answer.version, now)
        if slot.asking:
            arrives += self._exchange.seconds(
                worker=slot.number,
                iteration=slot.pushes,
                batch_size=0,
                natural_seconds=self._scenario.exchange_seconds,
                now=0.0,
            )
        slot.answer = answer
        if arrives > now or self._overlaps:  # An overlapping worker may push in turn, which takes its own event.
            heappush(self.heap, (arrives, _ANSWER, slot.number, slot.incarnation))
        else:
            self._receive(slot, now)


def _slots(scenario: Scenario, *, grouped: bool) -> list[WorkerSlot]:
    """The slots of all workers, `grouped` with their group servers."""
    slots = [WorkerSlot(number) for number in range(len(scenario.cluster))]
    for group in scenario.group_servers if grouped else ():
        server = GroupServer()
        for worker in group:
            slots[worker].group = server
    return slots
