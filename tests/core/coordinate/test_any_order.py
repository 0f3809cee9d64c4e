import copy
import json
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from msgspec import structs
from support.groupings import Restless
from support.watched_sync import WatchedSync

from evenstep.core.coordinate import Answer, Apply, Arrival, Bundle, Coordinator, Given
from evenstep.core.errors import DisagreementError, ProtocolError
from evenstep.core.groups import ByRank, BySpeed, Progressive
from evenstep.core.load import Equal, Experts, PerEpoch, Static
from evenstep.core.samples.pass_costs import PassCosts
from evenstep.core.sync import Barrier, Bounded, Dynamic, Grouped, Regroup, Unbounded
from evenstep.core.values import UNLIMITED, Problem

SYNCS = [
    Barrier(),
    Bounded(bound=0),
    Bounded(bound=2),
    Dynamic(lower=0, upper=3),
    Dynamic(lower=1, upper=4, bounded=False),
    Unbounded(),
    Grouped(grouping=ByRank(1)),
    Grouped(grouping=ByRank(2)),
    Grouped(grouping=ByRank(2), across=Bounded(bound=0)),
    Grouped(grouping=ByRank(3), across=Dynamic(lower=0, upper=3)),
    Grouped(grouping=BySpeed(2), across=Bounded(bound=1)),
    Grouped(grouping=Progressive()),
    Grouped(grouping=ByRank(2), across=Barrier()),
    *(Grouped(grouping=Restless(), across=across) for across in (Unbounded(), Bounded(bound=0), Barrier())),
]


def watched(part):
    """The part under watch; of groups, which are the parent's workers, the policy between them."""
    return replace(part, across=WatchedSync(part.across)) if isinstance(part, Grouped) else WatchedSync(part)


@dataclass
class Worker:
    """One that is here, as whoever talks to it sees it; `asks` is the request that it waits to be answered."""

    incarnation: int
    ahead: int = 0
    remembered: int = 1
    asks: str | None = None
    begun: int | None = None
    late: bool = False
    claims: list = field(default_factory=list)
    versions: list = field(default_factory=list)

    @property
    def computes(self):
        return self.asks is None and bool(self.claims)

    @property
    def begun_now(self):
        """Is in its loop and waits for nothing."""
        return self.asks is None and self.begun is not None

    @property
    def idle(self):
        """Was told that nothing is left for it, and has not asked again."""
        return self.asks is None and self.begun is not None and not self.claims


@dataclass
class _Limit:
    """The largest batch that a worker is known to hold; it may always have `least`."""

    least: int
    latest: int = UNLIMITED
    smallest: int = UNLIMITED

    @property
    def now(self):
        return max(self.latest, self.least)

    def report(self, largest):
        self.latest, self.smallest = largest, min(largest, self.smallest)


class AnyOrder(RuleBasedStateMachine):
    """Workers come, go, die, loop, break and return in any order; a plain book of all positions and pushes is kept."""

    part = None
    settling = False
    costs = None

    @initialize(data=st.data())
    def start(self, data):
        draw = data.draw
        self.count = draw(st.integers(1, 5))
        minimum = draw(st.sampled_from([1, 1, 2]))
        self.minimum = minimum
        batch = draw(st.integers(minimum * self.count, 6 * self.count))
        multiple = draw(st.sampled_from([1, 1, 2])) if batch % 2 == 0 and self.count * 2 <= batch else 1
        fair = -(-batch // self.count) + 1
        maximum = draw(st.sampled_from([UNLIMITED, fair + 1, fair]))
        self.problem = Problem(
            global_batch_size=batch,
            minimum=np.full(self.count, minimum),
            maximum=np.full(self.count, maximum),
            multiple=multiple,
        )
        loads = [Equal(), Experts(predictor="last", change_cost=0.0, warmup=0), PerEpoch()]
        if multiple == 1:
            sizes = [batch // self.count + (worker < batch % self.count) for worker in range(self.count)]
            loads.append(Static(sizes=tuple(sizes)))
        self.load = draw(st.sampled_from(loads))
        self.length = draw(st.integers(1, 40))
        self.drop_last = draw(st.booleans())
        self.used = self.length - self.length % batch if self.drop_last else self.length
        self.coordinator, self.again = self.new(), self.new()
        self.now = 0.0
        self.version = 0
        self.committed_at = [0]
        self.workers = {}
        self.awaited = set(range(self.count))
        self.incarnation = 0
        self.sequence = 0
        self.next_pass = dict.fromkeys(range(self.count), 0)
        self.open = {}
        self.done = {}
        self.arrived = {}
        least = -(-minimum // multiple) * multiple
        self.limits = [_Limit(least) for _ in range(self.count)]

    def new(self):
        return Coordinator(
            sync=watched(self.part),
            load=self.load,
            problem=self.problem,
            length=self.length,
            drop_last=self.drop_last,
        )

    # What is looked at.

    def send(self, event):
        number = self.coordinator.passes.number
        commands = event(self.coordinator)
        assert event(self.again) == commands
        for command in commands or []:
            if isinstance(command, Apply):
                self.update(command)
            elif isinstance(command, Given):
                self.take(self.workers[command.worker], command.worker, command.claims)
            elif not isinstance(command, Regroup):
                self.answer(command)
        self.look(number)

    def update(self, update):
        pushes = [self.arrived.pop(key) for key, _ in update.pushes]
        total = sum(units for _, _, units, _ in pushes)
        for (_, weight), (_, _, units, samples) in zip(update.pushes, pushes, strict=True):
            assert samples
            assert weight == pytest.approx(units / total)
        assert update.staleness == max(self.version - version for _, version, _, _ in pushes)
        missed = max(self.committed_at[-1] - self.committed_at[version] for _, version, _, _ in pushes)
        assert update.behind == missed / self.problem.global_batch_size
        samples = sum(samples for *_, samples in pushes)
        part = samples / self.problem.global_batch_size
        # Whoever is the only group there is, is all there are.
        shares = {1.0, part} if isinstance(self.part, Grouped) else {1.0 if self.part.in_step else part}
        assert any(update.share == pytest.approx(share) for share in shares)
        self.version += 1
        self.committed_at.append(self.committed_at[-1] + samples)
        assert update.version == self.version
        for claim, *_ in pushes:
            self.finish(claim)

    def finish(self, name):
        number, claim = name
        positions = set(claim.positions)
        assert self.open[number].pop(claim.number) == positions
        assert not positions & self.done.setdefault(number, set())
        self.done[number] |= positions

    def answer(self, answer):
        worker = self.workers[answer.worker]
        assert worker.asks is not None, f"{answer} to nothing that was asked"
        asked, worker.asks = worker.asks, None
        assert answer.version == self.version
        assert answer.whole == (answer.over or not worker.versions)
        worker.versions = [*worker.versions, answer.version][-worker.remembered :]
        self.take(worker, answer.worker, answer.claims)
        if answer.over:
            assert not worker.claims
            # Where all have left their loops, nobody is left for what others have given back.
            left = asked == "end" and not any(
                each.begun == worker.begun and not each.asks for each in self.others(worker)
            )
            assert worker.late or left or len(self.done.get(worker.begun, ())) == self.used
            worker.begun = None
        self.answered(answer)

    def others(self, worker):
        return [each for each in self.workers.values() if each is not worker]

    def take(self, worker, rank, claims):
        for claim in claims:
            positions = set(claim.positions)
            taken = self.open.setdefault(worker.begun, {})
            assert positions
            assert len(positions) == len(claim.positions)
            assert positions <= set(range(self.used))
            assert not any(positions & others for others in [*taken.values(), self.done.get(worker.begun, set())])
            if self.costs is None:
                assert len(positions) <= self.problem.maximum[rank]
                if not isinstance(self.load, Static):
                    assert len(positions) <= self.limits[rank].now
            elif not self.part.in_step and len(positions) > self.minimum:
                # By cost; slices that cost more than all workers hold are computed all the same.
                cost = sum(self.costs.between(start, stop) for start, stop in claim.ranges)
                assert cost <= min(int(self.problem.maximum[rank]), self.limits[rank].now) * self.costs.mean
            assert claim.number not in taken
            taken[claim.number] = positions
            worker.claims.append((worker.begun, claim))
        assert len(worker.claims) <= 1 + worker.ahead

    # What stands between the workers and the coordinator: nothing.

    def asked(self, rank, what):
        pass

    def pass_on(self, arrival):
        self.deliver(arrival)

    def deliver(self, arrival):
        self.limits[arrival.key[0]].report(arrival.row[-1])
        if not arrival.samples:  # Nothing is left to commit.
            self.finish(self.arrived.pop(arrival.key)[0])
        self.send(lambda coordinator: coordinator.push(arrival, self.now))

    def answered(self, answer):
        pass

    def gone(self, rank):
        pass

    def look(self, before):
        number = self.coordinator.passes.number
        everyone = self.workers.values()
        inside = [worker for worker in everyone if worker.begun is not None and worker.begun <= number]
        assert all(worker.begun == number for worker in inside)
        if number > before:
            assert not any(self.open.get(before, {}).values())
        assert self.coordinator.version == self.version
        assert self.coordinator.samples == self.committed_at[-1]
        assert self.coordinator.claims.finished == len(self.done.get(number, ()))
        # Whoever waits does so for somebody who can act.
        busy = self.settling or any(worker.computes for worker in everyone)
        if any(worker.asks == "end" for worker in inside):
            busy |= any(worker.idle for worker in inside)
        if any(worker.asks and worker.begun == number for worker in inside):
            assert busy or self.gathers
        if any(worker.asks == "rest" for worker in inside) and not self.gathers:
            opened = sum(len(positions) for positions in self.open.get(number, {}).values())
            assert opened + len(self.done.get(number, ())) == self.used
        if any(worker.begun is not None and worker.begun > number for worker in everyone):
            elsewhere = any(worker.begun is None for worker in everyone)
            assert inside or (self.part.in_step and elsewhere) or self.gathers

    @property
    def gathers(self):
        """Whether nobody may run before somebody has come who is still awaited."""
        return self.part.in_step and bool(self.awaited)

    # What happens.

    def some(self, data, wanted):
        return data.draw(st.sampled_from(sorted(rank for rank, worker in self.workers.items() if wanted(worker))))

    def any_(self, wanted):
        return any(wanted(worker) for worker in self.workers.values())

    @rule(seconds=st.integers(0, 5))
    def wait(self, seconds):
        self.now += seconds

    @precondition(lambda self: len(self.workers) < self.count)
    @rule(data=st.data(), everyone=st.booleans())
    def join(self, data, everyone):
        absent = sorted({*range(self.count)} - {*self.workers})
        for rank in absent if everyone else [data.draw(st.sampled_from(absent))]:
            self.incarnation += 1
            self.workers[rank] = Worker(incarnation=self.incarnation)
            self.asked(rank, "join")
            self.send(lambda coordinator, rank=rank: coordinator.join(rank))

    @precondition(lambda self: self.awaited - {*self.workers})
    @rule(data=st.data())
    def never_come(self, data):
        rank = data.draw(st.sampled_from(sorted(self.awaited - {*self.workers})))
        self.awaited.discard(rank)
        self.send(lambda coordinator: coordinator.leave(rank, self.now))

    @precondition(lambda self: self.any_(lambda worker: worker.asks is None and worker.begun is None))
    @rule(data=st.data(), ahead=st.integers(0, 1), everyone=st.booleans())
    def begin(self, data, ahead, everyone):
        ready = [rank for rank, worker in self.workers.items() if worker.asks is None and worker.begun is None]
        for rank in ready if everyone else [data.draw(st.sampled_from(ready))]:
            worker = self.workers[rank]
            number = self.next_pass[rank]
            self.next_pass[rank] += 1
            if number in {self.coordinator.passes.number, *(each.begun for each in self.workers.values())}:
                with pytest.raises(DisagreementError):
                    self.coordinator.begin(rank, number, number + 7, self.now)
            self.awaited.discard(rank)
            worker.asks, worker.begun, worker.ahead, worker.remembered = "begin", number, ahead, 1 + ahead
            worker.late = number < self.coordinator.passes.number
            self.asked(rank, "begin")
            self.send(
                lambda coordinator, rank=rank, number=number: coordinator.begin(
                    rank, number, number + 3, self.now, ahead=ahead, costs=self.costs
                )
            )

    @precondition(lambda self: self.any_(lambda worker: worker.computes))
    @rule(
        data=st.data(),
        times=st.integers(1, 4),
        empty=st.integers(0, 6),
        skips=st.integers(0, 2),
        late=st.booleans(),
        units=st.integers(1, 50),
        speed=st.sampled_from([0, 1000, 3000]),
        largest=st.sampled_from([1, 8, UNLIMITED]),
    )
    def push(self, data, times, empty, skips, late, units, speed, largest):
        rank = self.some(data, lambda worker: worker.computes)
        for _ in range(times):
            if self.workers[rank].computes:
                self.compute(rank, empty=not empty, skips=skips, late=late, units=units, speed=speed, largest=largest)

    def compute(self, rank, *, empty=False, skips=0, late=False, units=1, speed=1000, largest=UNLIMITED):
        worker = self.workers[rank]
        self.sequence += 1
        skipped = [] if self.part.in_step else worker.claims[: min(skips, len(worker.claims) - 1)]
        (_, claim), *worker.claims = worker.claims[len(skipped) :]
        samples = 0 if empty else claim.samples
        arrival = Arrival(
            key=(rank, worker.incarnation, self.sequence),
            claim=claim.number,
            version=worker.versions[0 if late else -1],
            samples=samples,
            units=units,
            row=(claim.samples, claim.samples * speed, 0, largest),
        )
        self.refused(rank, arrival)
        for each in skipped:
            self.finish(each)
        self.arrived[arrival.key] = ((worker.begun, claim), arrival.version, units, samples)
        worker.asks = "push"
        self.pass_on(arrival)

    @precondition(lambda self: self.any_(lambda worker: worker.computes))
    @rule(data=st.data())
    def all_but_one_go_on_until_nothing_is_left(self, data):
        slow = self.some(data, lambda worker: worker.computes)
        while ready := [rank for rank, worker in self.workers.items() if rank != slow and worker.computes]:
            self.compute(ready[0])
        for rank in [rank for rank, worker in self.workers.items() if worker.idle]:
            self.rest_now(rank)

    def refused(self, rank, arrival):
        """What cannot be is refused, and changes nothing."""
        wrong = {"claim": 10**6}, {"version": self.version + 1}, {"key": (self.count, 0, 0)}
        for change in wrong:
            with pytest.raises(ProtocolError):
                self.coordinator.push(structs.replace(arrival, **change), self.now)
        with pytest.raises(ProtocolError):
            self.coordinator.rest(rank, self.now, done=None if self.part.in_step else 10**6)
        with pytest.raises(ProtocolError):
            self.coordinator.join(rank)
        if self.part.in_step:
            with pytest.raises(ProtocolError):
                self.coordinator.more(rank, 1)

    @precondition(lambda self: not self.part.in_step and self.any_(lambda worker: worker.computes))
    @rule(data=st.data(), ahead=st.integers(1, 3))
    def fetch_ahead(self, data, ahead):
        rank = self.some(data, lambda worker: worker.computes)
        worker = self.workers[rank]
        worker.ahead = max(ahead, worker.ahead)
        before = len(worker.claims), self.coordinator.claims.unclaimed
        self.send(lambda coordinator: coordinator.more(rank, ahead))
        assert len(worker.claims) == 1 + worker.ahead or not self.coordinator.claims.unclaimed
        assert len(worker.claims) >= before[0]

    @precondition(lambda self: not self.part.in_step and self.any_(lambda worker: worker.begun_now))
    @rule(data=st.data(), ended=st.booleans())
    def rest_with_claims(self, data, ended):
        """Its loop has ended, or it does not compute what it holds."""
        rank = self.some(data, lambda worker: worker.begun_now)
        worker = self.workers[rank]
        count = data.draw(st.integers(0, len(worker.claims)))
        done = worker.claims[count - 1][1].number if count else None
        for each in worker.claims[:count]:
            self.finish(each)
        for number, claim in worker.claims[count:]:
            del self.open[number][claim.number]
        worker.claims, worker.asks = [], "end" if ended else "rest"
        self.asked(rank, "rest")
        self.send(lambda coordinator: coordinator.rest(rank, self.now, done=done, ended=ended))

    @precondition(lambda self: self.any_(lambda worker: worker.idle))
    @rule(data=st.data())
    def rest(self, data):
        self.rest_now(self.some(data, lambda worker: worker.idle))

    def rest_now(self, rank):
        with pytest.raises(ProtocolError):
            self.coordinator.more(rank, 1)
        self.workers[rank].asks = "rest"
        self.asked(rank, "rest")
        self.send(lambda coordinator: coordinator.rest(rank, self.now))

    @precondition(lambda self: self.any_(lambda worker: worker.asks is None and worker.begun is not None))
    @rule(data=st.data())
    def stop(self, data):
        rank = self.some(data, lambda worker: worker.asks is None and worker.begun is not None)
        self.give_back(self.workers[rank])
        self.asked(rank, "stop")
        self.send(lambda coordinator: coordinator.stop(rank, self.now))
        self.gone(rank)

    def heard(self, rank):
        """What a worker waits for, as far as the coordinator knows."""
        return self.workers[rank].asks

    @precondition(lambda self: self.workers)
    @rule(seldom=st.integers(0, 3))
    def see_who_is_waited_for(self, seldom):
        if seldom:
            return
        waited = self.coordinator.waited_for()
        waiting = {rank for rank in self.workers if self.heard(rank)}
        assert not waiting & set(waited)
        # Those who are not waited for hold nobody: without them, nobody is answered.
        without = copy.deepcopy(self.coordinator)
        for rank in self.workers.keys() - waiting - set(waited):
            assert not any(isinstance(command, Answer) for command in without.leave(rank, self.now))
        # And once all who are waited for are gone, nobody waits any more.
        without, left = copy.deepcopy(self.coordinator), set(self.workers)
        for rank in self.awaited - left:
            waiting -= {each.worker for each in without.leave(rank, self.now) if isinstance(each, Answer)}
        while waited := without.waited_for():
            left.discard(waited[0])
            waiting -= {each.worker for each in without.leave(waited[0], self.now) if isinstance(each, Answer)}
        assert not waiting

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def leave(self, data):
        self.lose(self.some(data, lambda worker: True))

    def lose(self, rank):
        self.asked(rank, "leave")
        self.give_back(self.workers.pop(rank))
        self.awaited.discard(rank)
        self.limits[rank].latest = self.limits[rank].smallest
        self.send(lambda coordinator: coordinator.leave(rank, self.now))
        self.gone(rank)

    def give_back(self, worker):
        for number, claim in worker.claims:
            del self.open[number][claim.number]
        worker.claims, worker.begun = [], None

    @precondition(lambda self: self.workers)
    @rule(seldom=st.integers(0, 3))
    def start_from_a_snapshot(self, seldom):
        if seldom:
            return
        state = json.loads(json.dumps(self.coordinator.state_dict()))
        self.coordinator, self.again = self.new(), self.new()
        for coordinator in (self.coordinator, self.again):
            coordinator.load_state_dict(copy.deepcopy(state))
        for rank, worker in self.workers.items():
            if worker.begun is not None:
                self.next_pass[rank] = worker.begun
        self.workers.clear()
        self.open.clear()
        self.arrived.clear()
        self.awaited = set(range(self.count))
        for limit in self.limits:
            limit.smallest = limit.latest

    def teardown(self):
        if not hasattr(self, "workers"):
            return
        for rank in list(self.workers):
            self.lose(rank)
        assert not self.arrived


@pytest.mark.parametrize("part", SYNCS, ids=repr)
def test_promises_hold_in_any_order_of_events(part):
    machine = type("AnyOrder", (AnyOrder,), {"part": part})
    run_state_machine_as_test(machine, settings=settings(max_examples=10, stateful_step_count=60))


bounds = st.one_of(
    st.just(Barrier()),
    st.just(Unbounded()),
    st.builds(Bounded, bound=st.integers(0, 3)),
    st.tuples(st.integers(0, 3), st.integers(0, 4), st.booleans()).map(
        lambda drawn: Dynamic(lower=drawn[0], upper=drawn[0] + drawn[1], bounded=drawn[2])
    ),
)
groupings = st.one_of(
    st.builds(ByRank, st.integers(1, 5)),
    st.builds(BySpeed, st.integers(1, 5)),
    st.builds(Progressive, worth=st.floats(0.01, 0.5), behind=st.floats(0.1, 10.0), most=st.integers(1, 5)),
    st.just(Restless()),
)


class AnyScheme(AnyOrder):
    """Of a scheme that is drawn too: any sizes, any bound, any groups."""

    @initialize(data=st.data())
    def start(self, data):
        self.part = data.draw(st.one_of(bounds, st.builds(Grouped, grouping=groupings, across=bounds)))
        super().start(data=data)


def test_nobody_waits_for_ever_under_any_scheme():
    run_state_machine_as_test(AnyScheme, settings=settings(max_examples=50, stateful_step_count=60))


class AnyCosts(AnyScheme):
    """The same with samples that differ in cost: claims are sized by it, and nothing else changes."""

    @initialize(data=st.data())
    def start(self, data):
        super().start(data=data)
        self.load = Equal() if isinstance(self.load, Static) else self.load
        self.coordinator, self.again = self.new(), self.new()
        drawn = data.draw(st.lists(st.integers(1, 40), min_size=self.length, max_size=self.length))
        self.costs = PassCosts.of(np.array(drawn), max(sum(drawn) // len(drawn), 1))


def test_promises_hold_whatever_samples_cost():
    run_state_machine_as_test(AnyCosts, settings=settings(max_examples=50, stateful_step_count=60))


class TwoLevels(AnyOrder):
    """Some groups have a server, which passes on the pushes of its workers as one; it may die, and they with it."""

    @initialize(data=st.data())
    def start(self, data):
        super().start(data)
        groups = self.part.grouping.form(self.count)
        self.behind = {
            rank: number for number, group in enumerate(groups) if data.draw(st.booleans()) for rank in group
        }
        self.bundles = {number: Bundle() for number in self.behind.values()}
        self.held_back = {}
        self.together = {}

    def bundle_of(self, rank):
        return self.bundles[self.behind[rank]] if rank in self.behind else None

    def asked(self, rank, what):
        bundle = self.bundle_of(rank)
        if bundle is None:
            return
        line = self.workers[rank].incarnation
        self.settling = what in ("stop", "leave")
        {"join": bundle.join, "leave": bundle.leave}.get(what, bundle.ask)(line)
        held_back = self.held_back.pop(line, None) if what == "leave" else None
        if held_back is not None:
            # It was never heard of.
            (number, claim), *_ = self.arrived.pop(held_back.key)
            del self.open[number][claim.number]

    def pass_on(self, arrival):
        bundle = self.bundle_of(arrival.key[0])
        if bundle is None:
            super().pass_on(arrival)
            return
        line = self.workers[arrival.key[0]].incarnation
        bundle.push(line, arrival.samples, arrival.units)
        self.held_back[line] = arrival
        self.pass_on_what_is_due(bundle)

    def pass_on_what_is_due(self, bundle):
        together = bundle.due()
        if together is None:
            return
        arrivals = [self.held_back.pop(line) for line, _ in together.weights]
        weights = {arrival.key: weight for arrival, (_, weight) in zip(arrivals, together.weights, strict=True)}
        assert sum(weights.values()) == pytest.approx(1.0 if any(arrival.samples for arrival in arrivals) else 0.0)
        self.together |= dict.fromkeys(weights, weights)
        for number, arrival in enumerate(arrivals, 1):
            self.settling = number < len(arrivals)
            self.deliver(arrival)

    def answered(self, answer):
        bundle = self.bundle_of(answer.worker)
        if bundle is not None:
            bundle.answer(self.workers[answer.worker].incarnation, len(answer.claims), over=answer.over)

    def heard(self, rank):
        line = self.workers[rank].incarnation
        return None if line in self.held_back else super().heard(rank)

    def gone(self, rank):
        bundle = self.bundle_of(rank)
        if bundle is not None:
            self.settling = False
            self.pass_on_what_is_due(bundle)
            self.look(self.coordinator.passes.number)

    def update(self, update):
        super().update(update)
        weights = dict(update.pushes)
        for key in weights:
            # One gradient stands for all, with the sum of their weights: each counts as it would by itself.
            shared = {each: weight for each, weight in self.together.get(key, {key: 1.0}).items() if weight}
            whole = sum(weights[each] for each in shared)
            assert weights[key] == pytest.approx(shared[key] * whole)

    @precondition(lambda self: self.bundles)
    @rule(data=st.data(), seldom=st.integers(0, 3))
    def lose_a_group_server(self, data, seldom):
        if seldom:
            return
        number = data.draw(st.sampled_from(sorted(self.bundles)))
        for rank in sorted(rank for rank in self.workers if self.behind.get(rank) == number):
            self.lose(rank)

    @precondition(lambda self: self.workers)
    @rule(seldom=st.integers(0, 3))
    def start_from_a_snapshot(self, seldom):
        super().start_from_a_snapshot(seldom)
        if not seldom:
            self.bundles = {number: Bundle() for number in self.bundles}
            self.held_back.clear()


ACROSS = [Unbounded(), Bounded(bound=0), Bounded(bound=2), Dynamic(lower=0, upper=3), Barrier()]


@pytest.mark.parametrize("across", ACROSS, ids=repr)
@pytest.mark.parametrize("count", [1, 2])
def test_promises_hold_with_group_servers_in_between(count, across):
    machine = type("TwoLevels", (TwoLevels,), {"part": Grouped(grouping=ByRank(count), across=across)})
    run_state_machine_as_test(machine, settings=settings(max_examples=8, stateful_step_count=60))
