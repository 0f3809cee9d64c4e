import json

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from evenstep.core.sync import Barrier, Bounded, Commit, Dynamic, Push, Unbounded
from evenstep.core.sync.roster import Roster
from evenstep.testing.watched import Watched

WORKERS = 6


class AnyOrder(RuleBasedStateMachine):
    """Joins, pushes, empty pushes and leaves in any order at any times; `Watched` checks every command."""

    part = None
    highest_lead = None  # what no lead ever exceeds

    def __init__(self):
        super().__init__()
        self.policy = Watched(self.part.policy(WORKERS))
        self.again = self.part.policy(WORKERS)
        self.now = 0.0
        self.iteration = 0

    def send(self, event):
        commands = event(self.policy)
        assert event(self.again) == commands
        joined = [*self.policy.running, *self.policy.held]
        assert all(0 <= self.policy.lead(worker) <= self.highest_lead for worker in joined)
        slowest = [worker for worker in joined if self.policy.lead(worker) == 0]
        assert set(slowest) <= set(self.policy.running)
        self.look(commands)

    def look(self, commands):
        """What only one of the policies promises."""

    @rule(seconds=st.one_of(st.integers(0, 5), st.floats(0.0, 100.0)))
    def wait(self, seconds):
        self.now += seconds

    @precondition(lambda self: len(self.policy.running) + len(self.policy.held) < WORKERS)
    @rule(data=st.data())
    def join(self, data):
        absent = sorted({*range(WORKERS)} - {*self.policy.running, *self.policy.held})
        worker = data.draw(st.sampled_from(absent))
        self.send(lambda policy: policy.on_join(worker, self.now))

    @precondition(lambda self: self.policy.running)
    @rule(data=st.data(), times=st.integers(1, 4), samples=st.sampled_from([0, 1, 8]))
    def push(self, data, times, samples):
        worker = data.draw(st.sampled_from(self.policy.running))
        for _ in range(times):
            if worker in self.policy.running:
                self.iteration += 1
                push = Push(
                    worker=worker,
                    iteration=self.iteration,
                    samples=samples,
                    units=samples,
                    share=samples / 8,
                    version=0,
                )
                self.send(lambda policy, push=push: policy.on_push(push, self.now))

    @precondition(lambda self: self.policy.running)
    @rule(data=st.data())
    def leave(self, data):
        worker = data.draw(st.sampled_from([*self.policy.running, *self.policy.held]))
        self.send(lambda policy: policy.on_leave(worker, self.now))

    @precondition(lambda self: self.policy.running)
    @rule()
    def all_leave_for_a_checkpoint(self):
        for worker in [*self.policy.running, *self.policy.held]:
            self.policy.on_leave(worker, self.now)
        self.again = self.part.policy(WORKERS)
        self.again.load_state_dict(json.loads(json.dumps(self.policy.state_dict())))

    def teardown(self):
        for worker in [*self.policy.held, *self.policy.running]:
            self.policy.on_leave(worker, self.now)


class AnyOrderOfBarrier(AnyOrder):
    def look(self, commands):
        commits = [command for command in commands if isinstance(command, Commit)]
        assert len(commits) <= 1
        for commit in commits:
            assert commit.share == 1.0
            assert [push.worker for push in commit.pushes] == sorted(push.worker for push in commit.pushes)
            assert not self.policy.held


CASES = {
    "barrier": (AnyOrderOfBarrier, Barrier(), 1),
    "bounded by 0": (AnyOrder, Bounded(bound=0), 1),
    "bounded by 2": (AnyOrder, Bounded(bound=2), 3),
    "dynamic": (AnyOrder, Dynamic(lower=1, upper=4), 5),
    "dynamic from 0": (AnyOrder, Dynamic(lower=0, upper=3), 4),
    "dynamic without a bound": (AnyOrder, Dynamic(lower=1, upper=4, bounded=False), 10**9),
    "unbounded": (AnyOrder, Unbounded(), 10**9),
}


@pytest.mark.parametrize("name", CASES)
def test_promises_hold_in_any_order_of_events(name):
    machine, part, highest_lead = CASES[name]
    members = {"part": part, "highest_lead": highest_lead}
    run_state_machine_as_test(
        type(machine.__name__, (machine,), members), settings=settings(max_examples=10, stateful_step_count=50)
    )


class RosterInAnyOrder(RuleBasedStateMachine):
    """Against a list of (worker, iterations) in the order in which they came there."""

    def __init__(self):
        super().__init__()
        self.roster = Roster()
        self.plain = []

    @rule(worker=st.integers(0, 5), event=st.sampled_from(["push", "push", "leave"]))
    def happen(self, worker, event):
        known = dict(self.plain)
        if worker not in known:
            self.roster.join(worker, 0.0, bound=None)
            self.plain.append((worker, min(known.values(), default=0)))
        else:
            self.plain.remove((worker, known[worker]))
            if event == "leave":
                self.roster.leave(worker)
            else:
                self.roster.push(Push(worker, known[worker], 1, 1, 1.0, 0), 0.0)
                self.roster.release(worker, 0.0, bound=None)
                self.plain.append((worker, known[worker] + 1))
        self.check()

    def check(self):
        known = dict(self.plain)
        slowest = min(known.values(), default=0)
        assert len(self.roster) == len(known)
        assert self.roster.slowest == slowest
        assert self.roster.fastest == max(known.values(), default=0)
        assert all(self.roster.lead(worker) == known[worker] - slowest for worker in known)
        if known:
            assert self.roster.last_of_slowest() == [worker for worker, at in self.plain if at == slowest][-1]


def test_a_roster_is_that_of_a_plain_list_in_any_order_of_events():
    run_state_machine_as_test(RosterInAnyOrder, settings=settings(max_examples=20, stateful_step_count=50))
