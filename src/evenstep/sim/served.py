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
from evenstep.sim.place import Place, Pushed
from evenstep.sim.queue import Events, Kind
from evenstep.sim.result import SimulatedRun
from evenstep.sim.scenario import Scenario
from evenstep.sim.worker import VirtualWorker, batch_of, rests_on_estimates

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
        self._places = [Place(number) for number in range(len(scenario.cluster))]
        self._events = Events()
        self._now = 0.0
        self._arrivals_in_vain = 0
        self._sizes: dict[int, list[int]] = {}
        """What each worker has heard of everybody's sizes, where it is written down."""
        self._tallied = (0.0, 0, 0)
        self._spared = 0
        """Messages of gradients that were never sent, since several pushes travelled as one."""
        self._handlers: tuple[Callable[[Place, float], None], ...] = (
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
        heap, pop, places, handlers = self._events.heap, self._events.pop, self._places, self._handlers
        handled, coordinator, budget = 0, self._coordinator, self._budget
        while heap and coordinator.samples < budget:
            now, kind, worker, incarnation = pop()
            place = places[worker]
            if incarnation != place.incarnation:
                continue  # It was meant for one that is gone.
            self._now = now
            handlers[kind](place, now)
            handled += 1
            if not handled % _PROGRESS_EVERY:
                progress(coordinator.samples / budget)
        return self._result()

    # Workers come and go.

    def _gather(self) -> None:
        """Those who are there from the beginning have all come before any begins."""
        absent = []
        for place, spec in zip(self._places, self._scenario.cluster.workers, strict=True):
            if spec.spot is not None:
                place.stays = spec.spot.stays(place.number)
                stay = next(place.stays)
                if stay.begins > 0.0:
                    self._events.add((stay.begins, _JOIN, place.number, place.incarnation))
                    place.leaves_at = stay.ends
                    absent.append(place.number)
                    continue
                place.leaves_at = stay.ends
            self._come(place, 0.0)
        for worker in absent:
            self._carry_out(self._coordinator.leave(worker, 0.0), 0.0)
        for place in self._places:
            if place.here_since is not None:
                self._begin(place, 0, 0.0)

    def _come(self, place: Place, now: float) -> None:
        spec = self._scenario.cluster.workers[place.number]
        place.come(now, VirtualWorker(spec, place.number, self._scenario.scheme, estimates=self._estimates))
        self._coordinator.join(place.number)
        if place.number in self._behind:
            self._behind[place.number].bundle.join(place.number)
        if place.leaves_at is not None:
            self._events.add((place.leaves_at, _LEAVE, place.number, place.incarnation))
        if self._log is not None:
            self._log.run(place.number, self._scenario)
            self._log.served("join", now, self._coordinator.version, worker=place.number, incarnation=place.incarnation)

    def _join(self, place: Place, now: float) -> None:
        self._arrivals_in_vain += 1
        if self._arrivals_in_vain > _PATIENCE * len(self._places):
            raise ConfigError(
                f"nothing has been committed for {self._arrivals_in_vain} arrivals of workers, which leave before they"
                " have computed anything: give their [spots.NAME] longer stays, or the workers smaller batches"
            )
        self._come(place, now)
        self._begin(place, max(self._coordinator.number, 0), now)

    def _leave(self, place: Place, now: float) -> None:
        place.go(now)
        stay = next(place.stays, None)
        if stay is not None:
            place.leaves_at = stay.ends
            self._events.add((stay.begins, _JOIN, place.number, place.incarnation))
        if self._log is not None:
            self._log.served("leave", now, self._coordinator.version, worker=place.number, why="was taken away")
        if place.number in self._behind:
            self._behind[place.number].bundle.leave(place.number)
        self._carry_out(self._coordinator.leave(place.number, now), now)
        self._pass_on(place, now)

    # A worker's loop.

    def _begin(self, place: Place, number: int, now: float) -> None:
        """The worker begins the pass of that number; passes and epochs have the same numbers here."""
        place.epoch = number
        place.entered = now
        place.over = False
        self._heard("begin", place, now, number=number, epoch=number, ahead=self._ahead)
        self._holds_nothing(place, now)
        self._carry_out(self._coordinator.begin(place.number, number, number, now, ahead=self._ahead), now)

    def _ask(self, place: Place, now: float) -> None:
        """The worker has nothing: it waits for claims, or goes on with the next pass."""
        if place.over:
            self._begin(place, place.epoch + 1, now)
        else:
            self._heard("rest", place, now)
            self._holds_nothing(place, now)
            self._carry_out(self._coordinator.rest(place.number, now), now)

    def _start(self, place: Place, now: float) -> None:
        """The worker computes on its next claim."""
        if place.idle_since is not None:
            place.idle_seconds += now - place.idle_since
            place.idle_since = None
        claim = place.computing = place.claims.popleft()
        samples = place.last_batch_size = claim.samples
        place.batch = batch = samples if samples >= self._minimum else batch_of(samples, self._minimum)
        place.handed_out_on = place.version
        place.began = now
        assert place.worker is not None
        if self._log is not None:
            slowness = place.worker.news.of(place.iterations)
            if slowness is not None:
                self._log.disturbance(place.number, place.iterations, now, slowness)
        place.seconds = seconds = place.worker.seconds(place.iterations, batch, now)
        place.iterations += 1
        self._events.add((now + seconds, _COMPUTED, place.number, place.incarnation))

    def _compute_ends(self, place: Place, now: float) -> None:
        place.computed, place.computing = place.computing, None
        place.blocked_since = now
        if not place.asking:  # Where exchanges overlap with compute, one at a time is under way.
            self._send(place, now)

    def _send(self, place: Place, now: float) -> None:
        """Push what was computed; where exchanges overlap, go on meanwhile."""
        claim, place.computed = place.computed, None
        assert claim is not None
        assert place.worker is not None
        samples, batch, seconds = place.last_batch_size, place.batch, place.seconds
        row = place.worker.row(batch, seconds, batch)
        place.samples += samples
        place.pushes = sequence = place.pushes + 1  # Which go up over all of its stays.
        # In order and not by name, which takes twice as long: key, claim, version, samples, units, row.
        key = (place.number, place.incarnation, sequence)
        arrival = Arrival(key, claim.number, place.handed_out_on, samples, samples, row)
        place.compute_seconds += seconds
        place.asking = True
        place.arrived_at = None
        if self._log is not None:
            place.pushed = Pushed(
                number=place.iterations - 1, samples=samples, entered=place.entered, began=place.began, row=row
            )
        if self._overlaps:
            self._go_on_meanwhile(place, now)
        place.arrival = arrival
        if self._free:
            self._arrive(place, now)
        elif place.number in self._behind:
            self._behind[place.number].bundle.push(place.number, samples, samples)
            self._pass_on(place, now)
        else:
            arrives = self._network.push_arrives(place.number, now)
            self._events.add((arrives, _PUSH, place.number, place.incarnation))

    def _holds_nothing(self, place: Place, now: float) -> None:
        """Nobody's push waits for this worker's any more."""
        if place.number in self._behind:
            self._behind[place.number].bundle.ask(place.number)
            self._pass_on(place, now)

    def _pass_on(self, place: Place, now: float) -> None:
        """The server of the worker's group sends what is due, in one message; nothing where it has none."""
        group = self._behind.get(place.number)
        together = None if group is None else group.bundle.due()
        if together is None:
            return
        workers = [worker for worker, _ in together.weights]
        self._spared += len(workers) - 1
        arrives = self._network.push_arrives(workers[0], now)
        for worker in workers:
            self._events.add((arrives, _PUSH, worker, self._places[worker].incarnation))

    def _pull_arrives(self, worker: int, version: int, now: float) -> float:
        """When the weights of this version, sent now, have reached the worker, of whose group only one is sent them."""
        group = self._behind.get(worker)
        if group is None:
            return self._network.pull_arrives(worker, now)
        if group.version != version:
            group.version, group.arrives = version, self._network.pull_arrives(worker, now)
        return max(now, group.arrives)

    def _go_on_meanwhile(self, place: Place, now: float) -> None:
        """The push is under way: compute on what is in hand, or wait."""
        if place.pushed is not None:
            place.pushed.ended = now
        place.entered = now
        if place.claims:
            place.blocked_since = None
            self._start(place, now)
        else:
            place.blocked_since = now

    def _arrive(self, place: Place, now: float) -> None:
        arrival = place.arrival
        assert arrival is not None
        place.arrived_at = now
        if self._log is not None:
            self._heard(
                "push", place, now, claim=arrival.claim, pulled=arrival.version, samples=arrival.samples,
                units=arrival.units, report=arrival.row,
            )  # fmt: skip
        self._carry_out(self._coordinator.push(arrival, now), now)

    def _take(self, place: Place, now: float) -> None:
        """The answer that was on its way has reached its worker."""
        answer, place.answer = place.answer, None
        assert answer is not None
        self._receive(place, answer, now)

    def _receive(self, place: Place, answer: Answer, now: float) -> None:
        place.version = answer.version
        place.over = answer.over
        place.claims.extend(answer.claims)
        if place.number in self._behind:
            self._behind[place.number].bundle.answer(place.number, len(answer.claims), over=answer.over)
        if place.asking:
            self._end_exchange(place, answer, now)
        if place.computed is not None:
            self._send(place, now)
        elif place.computing is None:
            if place.claims:
                self._start(place, now)
            else:
                place.idle_since = now if place.idle_since is None else place.idle_since
                self._events.add((now, _ASK, place.number, place.incarnation))

    def _end_exchange(self, place: Place, answer: Answer, now: float) -> None:
        """Count what the exchange took, as far as its worker waited for it."""
        place.asking = False
        took, since, release = 0.0, place.blocked_since, answer.release
        if since is not None:
            took = now - since
            place.blocked_since = None
        if release is not None:
            if took:
                waited = min(release.held_seconds, took)
                place.wait_seconds += waited
                place.comm_seconds += took - waited
            lead = release.lead
            if lead > place.largest_lead:
                place.largest_lead = lead
        else:
            place.comm_seconds += took
        if not self._overlaps:
            place.entered = now
        if self._log is not None and place.pushed is not None:
            place.pushed.synchronised = took
            place.write(self._log, now, answer)

    # The servers.

    def _heard(self, event: str, place: Place, now: float, **more: object) -> None:
        """Write down what reaches the coordinator, as a server does."""
        if self._log is not None:
            self._log.served(event, now, self._coordinator.version, worker=place.number, **more)

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
            place = self._places[worker]
            place.commit = update  # To be written down with the iteration that it commits.
            place.staleness += staleness
            if staleness > place.largest_staleness:
                place.largest_staleness = staleness

    def _send_answer(self, answer: Answer, now: float) -> None:
        worker = answer.worker
        place = self._places[worker]
        if place.here_since is None:
            return
        if self._log is not None or not answer.claims:
            # As the server does, which asks for everybody's sizes with every answer; with claims that has been done.
            self._plan(place)
        # Weights that the worker has already are not sent again.
        here = self._free or answer.version == place.version
        arrives = now if here else self._pull_arrives(worker, answer.version, now)
        if place.asking:
            arrives += self._exchange_takes(place)
        if arrives > now or self._overlaps:  # Whose worker may push in turn, which has to wait for the next event.
            place.answer = answer
            self._events.add((arrives, _ANSWER, worker, place.incarnation))
        else:
            self._receive(place, answer, now)

    def _exchange_takes(self, place: Place) -> float:
        if not self._exchange_jitter.spread:
            return self._exchange_seconds
        return self._exchange_jitter.seconds(
            worker=place.number, iteration=place.pushes, batch_size=0, natural_seconds=self._exchange_seconds, now=0.0
        )

    def _plan(self, place: Place) -> None:
        planned = self._coordinator.sizes
        by_worker = planned.all() if planned.members else {}
        if self._log is None:
            return
        sizes = [by_worker.get(worker, 0) for worker in range(len(self._places))]
        if sizes != self._sizes.get(place.number):
            self._sizes[place.number] = sizes
            self._log.plan(place.number, place.iterations, sizes)

    def _write_tally(self, now: float) -> None:
        assert self._log is not None
        since, commits, pushes = self._tallied
        version = self._coordinator.version
        pushed = sum(place.pushes for place in self._places) - self._spared
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
            for place in self._places:
                if place.here_since is not None:
                    self._log.end(place.number, self._now)
            self._write_tally(self._now)
        for place in self._places:
            place.end(self._now)
        return SimulatedRun(
            scheme=self._scenario.scheme.name,
            global_batch_size=self._scenario.global_batch_size,
            seconds=self._now,
            samples=coordinator.samples,
            commits=coordinator.version,
            complete=coordinator.samples >= self._budget,
            workers=tuple(place.result() for place in self._places),
        )
