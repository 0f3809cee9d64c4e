"""Barriers inside groups and another policy between them."""

import json

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from support.groupings import Restless
from support.watched_sync import WatchedSync

from evenstep.core.errors import ConfigError, ProtocolError
from evenstep.core.groups import ByHost, ByRank, BySpeed, GivenGroups, Progressive
from evenstep.core.sync import Barrier, Bounded, Commit, Dynamic, Grouped, Push, Regroup, Release, Unbounded

WORKERS = 6


def push(worker, iteration, *, samples=4, version=0):
    return Push(worker, iteration, samples, samples, samples / (4 * WORKERS), version)


def joined(part, workers=WORKERS):
    policy = part.policy(workers)
    for worker in range(workers):
        policy.on_join(worker, 0.0)
    return policy


def without_regroups(commands):
    return [command for command in commands if not isinstance(command, Regroup)]


def uneven(worker, iteration):
    """Compute seconds; no two pushes at one time."""
    return (1.0, 1.31, 1.73, 2.29)[worker] + 0.001 * ((7 * iteration + 3 * worker) % 11)


def test_one_group_has_the_trace_of_a_barrier(drive):
    grouped = drive(Grouped(grouping=ByRank(1)).policy(4), uneven, 4, 60.0)
    barrier = drive(Barrier().policy(4), uneven, 4, 60.0)
    assert grouped.releases == barrier.releases
    assert [c for c in without_regroups(grouped.commands) if isinstance(c, Commit)] == [
        c for c in barrier.commands if isinstance(c, Commit)
    ]


@pytest.mark.parametrize("across", [Unbounded(), Bounded(bound=2), Dynamic(lower=1, upper=4), Barrier()])
def test_groups_of_one_worker_have_the_trace_of_the_policy_across(drive, across):
    grouped = drive(Grouped(grouping=ByRank(4), across=across).policy(4), uneven, 4, 60.0)
    alone = drive(across.policy(4), uneven, 4, 60.0)
    assert without_regroups(grouped.commands) == alone.commands
    assert grouped.watched.held_seconds == alone.watched.held_seconds


def test_a_barrier_across_groups_is_a_barrier(drive):
    grouped = drive(Grouped(grouping=ByRank(2), across=Barrier()).policy(4), uneven, 4, 60.0)
    barrier = drive(Barrier().policy(4), uneven, 4, 60.0)
    assert grouped.releases == barrier.releases
    assert [c for c in grouped.commands if isinstance(c, Commit)] == [
        c for c in barrier.commands if isinstance(c, Commit)
    ]


@pytest.mark.parametrize("slowdown", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_one_slow_worker_of_16_costs_what_the_closed_form_says(drive, slowdown, count):
    run = drive(
        Grouped(grouping=ByRank(count)).policy(16), lambda worker, _: float(slowdown if worker == 5 else 1), 16, 400.0
    )
    pushes = sum(run.watched.pushes.values())
    time = 16 * 400.0 / pushes
    assert time == pytest.approx(16 / (16 - 16 / count + 16 / count / slowdown), rel=0.02)


def test_a_group_commits_as_one_and_its_members_go_on_together():
    policy = joined(Grouped(grouping=GivenGroups(((0, 3), (1, 2, 4, 5)))))
    assert policy.on_push(push(3, 1, version=2), 1.0) == []
    commit, *releases = policy.on_push(push(0, 1, version=1), 4.0)
    assert commit.pushes == (push(0, 1, version=1), push(3, 1, version=2))
    assert commit.share == pytest.approx(8 / 24)
    assert releases == [Release(0, 1, None, 0.0), Release(3, 1, None, 3.0)]


def test_a_push_of_a_group_that_the_bound_holds_is_refused():
    policy = joined(Grouped(grouping=ByRank(2), across=Bounded(bound=0)))
    for worker in (0, 1, 2):
        assert not [c for c in policy.on_push(push(worker, 1), 1.0) if isinstance(c, Release)]
    with pytest.raises(ProtocolError, match="worker 1 pushed its iteration 2 while its group is held"):
        policy.on_push(push(1, 2), 2.0)
    with pytest.raises(ProtocolError, match="worker 9 is in no group"):
        policy.on_push(push(9, 2), 2.0)


def test_who_joins_a_held_group_goes_on_with_it():
    policy = Grouped(grouping=ByRank(2), across=Bounded(bound=0)).policy(4)
    for worker in (0, 2, 3):
        policy.on_join(worker, 0.0)
    policy.on_push(push(0, 1), 1.0)
    assert policy.on_join(1, 2.0) == []
    policy.on_push(push(2, 1), 3.0)
    released = [c for c in policy.on_push(push(3, 1), 4.0) if isinstance(c, Release)]
    assert {each.worker: each.held_seconds for each in released} == {0: 3.0, 1: 2.0, 2: 1.0, 3: 0.0}


def test_the_last_of_a_group_to_leave_holds_nobody():
    policy = joined(Grouped(grouping=ByRank(2), across=Bounded(bound=0)), 4)
    policy.on_push(push(0, 1), 1.0)
    policy.on_push(push(1, 1), 1.0)
    policy.on_leave(2, 2.0)
    assert [c.worker for c in policy.on_leave(3, 3.0) if isinstance(c, Release)] == [0, 1]


def test_a_straggler_gets_a_group_of_its_own_and_comes_back_when_it_is_over(drive):
    def seconds(worker, iteration):
        return 4.0 if worker == 2 and 20 <= iteration < 60 else 1.0

    run = drive(Grouped(grouping=Progressive()).policy(8), seconds, 8, 400.0)
    told = [command for command in run.commands if isinstance(command, Regroup)]
    assert [each.groups for each in told] == [
        (tuple(range(8)),),
        ((0, 1, 3, 4, 5, 6, 7), (2,)),
        (tuple(range(8)),),
    ]
    assert told[1].reason == "worker 2 takes 4.00 times as long as worker 0: 2 groups do 3.62 times as much"
    assert told[2].reason == "one group does 1.00 times as much"


def test_what_a_barrier_across_holds_back_is_committed_before_other_groups_are_formed():
    policy = Grouped(grouping=Restless(), across=Barrier()).policy(3)
    for worker in range(3):
        policy.on_join(worker, 0.0)
    for now in range(1, 9):
        here = 3 if now < 4 else 2
        for worker in range(here):
            policy.on_push(push(worker, now, samples=12 // here), float(now))
        if now == 3:
            policy.on_leave(2, 3.5)
    pushes = [push(worker, 9, samples=6) for worker in (0, 1)]
    assert policy.on_push(pushes[0], 9.0) == []  # From here on there are to be other groups.
    assert policy.on_join(2, 9.1) == []
    commit, regroup, *releases = policy.on_push(pushes[1], 9.2)
    assert commit == Commit(tuple(pushes), 1.0)
    assert regroup == Regroup(((0, 1, 2),), "they are restless")
    assert [each.worker for each in releases] == [0, 1, 2]


def test_who_never_came_keeps_nobody_from_other_groups(drive):
    policy = Grouped(grouping=Progressive()).policy(4)
    run = drive(policy, lambda worker, _: 9.0 if worker == 2 else 1.0, 3, 200.0)
    told = [command.groups for command in run.commands if isinstance(command, Regroup)]
    assert told == [((0, 1, 2, 3),), ((0, 1, 3), (2,))]


def test_workers_of_similar_speed_find_each_other(drive):
    run = drive(Grouped(grouping=BySpeed(2)).policy(4), lambda worker, _: float((1, 3, 1, 3)[worker]), 4, 100.0)
    told = [command.groups for command in run.commands if isinstance(command, Regroup)]
    assert told == [((0, 1), (2, 3)), ((0, 2), (1, 3))]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ByRank(0), "in 0 groups: use 1 or more"),
        (lambda: BySpeed(-1), "in -1 groups: use 1 or more"),
        (lambda: Progressive(worth=0.0), "both are positive"),
        (lambda: Grouped(grouping=ByHost()).policy(2), "the hosts of the 2 workers are not known"),
        (lambda: Grouped(grouping=GivenGroups(((0,),))).policy(2), "each of the workers 0 to 1 once"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


class AnyOrder(RuleBasedStateMachine):
    """Joins, pushes, empty pushes and leaves in any order at any times, held against a plain book."""

    grouping = None
    across = None

    def __init__(self):
        super().__init__()
        self.policy = Grouped(grouping=self.grouping, across=WatchedSync(self.across)).policy(WORKERS)
        self.again = Grouped(grouping=self.grouping, across=self.across).policy(WORKERS)
        self.running, self.held, self.uncommitted = set(), {}, set()
        self.groups = None
        self.now = 0.0
        self.iteration = 0

    def send(self, event):
        commands = event(self.policy)
        # A new one tells its groups at its first event.
        assert without_regroups(event(self.again)) == without_regroups(commands)
        return commands

    def carry_out(self, commands):
        released = set()
        for command in commands:
            if isinstance(command, Regroup):
                assert not self.running, "groups change only where nobody runs"
                self.groups = command.groups
            elif isinstance(command, Commit):
                assert command.pushes
                assert command.share > 0.0
                assert self.uncommitted.issuperset(command.pushes)
                self.uncommitted.difference_update(command.pushes)
            else:
                assert command.held_seconds == self.now - self.held.pop(command.worker)
                assert command.bound is None or command.lead <= command.bound
                released.add(command.worker)
        self.running |= released
        assert self.running or not self.held, "nobody runs"
        assert self.running or not self.uncommitted, "a push is lost"
        return released

    @rule(seconds=st.integers(0, 5))
    def wait(self, seconds):
        self.now += seconds

    @precondition(lambda self: len(self.running) + len(self.held) < WORKERS)
    @rule(data=st.data(), everyone=st.booleans())
    def join(self, data, everyone):
        absent = sorted({*range(WORKERS)} - self.running - set(self.held))
        for worker in absent if everyone else [data.draw(st.sampled_from(absent))]:
            commands = self.send(lambda policy, worker=worker: policy.on_join(worker, self.now))
            self.held[worker] = self.now
            self.carry_out(commands)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), times=st.integers(1, 12), samples=st.sampled_from([0, 1, 8]))
    def push(self, data, times, samples):
        for _ in range(times):
            worker = data.draw(st.sampled_from(sorted(self.running)))
            self.now += data.draw(st.sampled_from([0.0, 1.0, 1.0 + worker]))
            self.iteration += 1
            pushed = push(worker, self.iteration, samples=samples)
            commands = self.send(lambda policy, pushed=pushed: policy.on_push(pushed, self.now))
            self.running.discard(worker)
            self.held[worker] = self.now
            if samples:
                self.uncommitted.add(pushed)
            released = self.carry_out(commands)
            for group in self.groups:  # The members of a group go on together.
                assert not (released.intersection(group) and set(self.held).intersection(group))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def leave(self, data):
        worker = data.draw(st.sampled_from(sorted({*self.running, *self.held})))
        commands = self.send(lambda policy: policy.on_leave(worker, self.now))
        self.running.discard(worker)
        self.held.pop(worker, None)
        self.carry_out(commands)

    @precondition(lambda self: self.running)
    @rule()
    def all_leave_for_a_checkpoint(self):
        for worker in sorted({*self.running, *self.held}):
            commands = self.send(lambda policy, worker=worker: policy.on_leave(worker, self.now))
            self.running.discard(worker)
            self.held.pop(worker, None)
            self.carry_out(commands)
        assert not self.uncommitted
        self.again = Grouped(grouping=self.grouping, across=self.across).policy(WORKERS)
        self.again.load_state_dict(json.loads(json.dumps(self.policy.state_dict())))


GROUPINGS = (
    ByRank(1),
    ByRank(3),
    ByRank(6),
    BySpeed(2),
    Progressive(),
    GivenGroups(((0, 5), (1, 2, 3, 4))),
    Restless(),
)
POLICIES = (Unbounded(), Bounded(bound=1), Dynamic(lower=1, upper=4), Barrier())


@pytest.mark.parametrize("across", POLICIES, ids=lambda part: type(part).__name__)
@pytest.mark.parametrize("grouping", GROUPINGS, ids=str)
def test_promises_hold_in_any_order_of_events(grouping, across):
    machine = type("AnyOrderOf", (AnyOrder,), {"grouping": grouping, "across": across})
    run_state_machine_as_test(machine, settings=settings(max_examples=10, stateful_step_count=40))
