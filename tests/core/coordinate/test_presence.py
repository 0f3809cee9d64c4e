"""Who is waited for, who has been for too long, and who is silent."""

import pytest

from evenstep.core.activity import Doing, Seen
from evenstep.core.coordinate import Lost, Presence
from evenstep.core.supervision import Why
from evenstep.core.sync import Barrier, Bounded, Dynamic, Unbounded


def test_held_workers_wait_for_the_slowest_that_run_and_for_no_others(Run):
    for sync in (Bounded(bound=0), Dynamic(lower=0, upper=0)):
        run = Run(sync, workers=3, batch=12, length=60)
        run.begin(0, 1, 2)
        assert run.coordinator.waited_for() == []
        run.push(0)
        assert run.coordinator.waited_for() == [1, 2]
        run.push(1)
        assert run.coordinator.waited_for() == [2]


def test_who_computes_is_waited_for_by_nobody_where_nothing_is_bounded(Run):
    run = Run(Unbounded(), workers=2, length=60)
    run.begin(0, 1)
    run.push(0, 0, 0)
    assert run.coordinator.waited_for() == []


def test_a_worker_that_rests_waits_for_those_who_hold_claims(Run):
    run = Run(Unbounded(), workers=3, batch=12, length=12)
    run.join(0, 1, 2)
    run.begin(0, 1, 2)
    run.push(1, 2, 2, 1, 2)
    assert run.coordinator.waited_for() == []  # they have not asked for more
    run.rest(2)
    assert run.coordinator.waited_for() == [0]


def test_a_worker_that_evaluates_is_waited_for_behind_a_barrier_only(Run):
    for sync, waited in ((Barrier(), [1]), (Bounded(bound=3), [])):
        run = Run(sync, length=8)
        run.join(0, 1)
        run.begin(0, 1)
        while any(run.held.values()):
            run.push(*(worker for worker, claims in run.held.items() if claims))
        for worker in (0, 1):
            if worker in run.coordinator.passes:
                run.rest(worker)
        assert run.coordinator.claims.over
        run.begin(0, number=1)
        assert run.coordinator.waited_for() == waited


def test_a_worker_that_has_not_begun_is_waited_for_where_all_go_in_step(Run):
    run = Run(Barrier(), workers=2, length=24)
    run.join(0, 1)
    run.begin(0)
    assert run.coordinator.waited_for() == [1]


def test_a_worker_that_came_to_a_snapshots_pass_and_has_not_begun_it_is_waited_for(Run):
    before = Run(Barrier(), workers=2, length=24)
    before.begin(0, 1)
    run = Run(Barrier(), workers=2, length=24)
    run.coordinator.load_state_dict(before.coordinator.state_dict())
    run.join(0, 1)
    run.begin(0)
    assert run.coordinator.waited_for() == [1]


HUNG = [Lost(1, Why.HUNG, 10.0)]
WAITING = Seen(doing=Doing.WAITING, iteration=3, seconds=0.5)
EVALUATING = Seen(doing=Doing.LEFT, iteration=3, seconds=0.5)


@pytest.fixture
def presence():
    """Worker 1 may keep others waiting for 10 s; there are no heartbeats."""
    presence = Presence()
    presence.joined(1, 10.0, 0.0)
    return presence


def test_patience_counts_from_when_others_began_to_wait(presence):
    assert presence.look(100.0) == []
    assert presence.look(101.0, [1]) == []
    assert presence.look(111.0, [1]) == []
    assert presence.look(111.5, [1]) == HUNG


@pytest.mark.parametrize(
    "start_over",
    [
        lambda presence: presence.asked(1, 5.0),
        lambda presence: presence.look(5.0),
        lambda presence: presence.look(5.0, [1], receiving=[1]),
        lambda presence: (
            presence.heard(1, 5.0, WAITING) or presence.look(5.0, [1]) or presence.heard(1, 5.0, EVALUATING)
        ),
    ],
    ids=["a request", "nobody waits", "gradients arrive", "it waits itself"],
)
def test_a_request_or_a_moment_without_anybody_waiting_starts_over(presence, start_over):
    presence.look(0.0, [1])
    start_over(presence)
    assert presence.look(11.0, [1]) == []
    assert presence.look(22.0, [1]) == HUNG


def test_a_worker_that_left_is_not_waited_for(presence):
    presence.look(0.0, [1])
    presence.left(1)
    assert presence.look(20.0, [1]) == []


def test_a_worker_that_is_silent_or_does_not_come_is_lost_after_the_heartbeat():
    presence = Presence(4.0)
    presence.look(0.0)
    presence.joined(0, 10.0, 0.0)
    presence.joined(1, 10.0, 0.0)
    presence.expect(2, 0.0)
    for now in (1.0, 2.0, 3.0, 4.0):
        presence.heard(0, now)
        presence.heard(2, now)  # It has not joined.
        assert presence.look(now) == []
    assert presence.look(4.5, receiving=[1]) == [Lost(2, Why.NEVER_CAME, 4.0)]
    assert presence.look(4.5) == [Lost(1, Why.SILENT, 4.0), Lost(2, Why.NEVER_CAME, 4.0)]
    presence.left(1)
    presence.left(2)
    assert presence.look(5.0) == []


def test_nobody_is_lost_since_this_process_stood_still_itself():
    presence = Presence(4.0)
    presence.look(0.0)
    presence.joined(1, 3.0, 0.0)
    presence.look(1.0, [1])
    assert presence.look(4.5, [1]) == []
    for now in (6.0, 7.0):
        presence.heard(1, now)
        assert presence.look(now, [1]) == []
    assert presence.look(8.0, [1]) == [Lost(1, Why.HUNG, 3.0)]


def test_what_a_hung_worker_was_last_seen_doing_is_not_older_than_its_silence(presence):
    nothing = "nothing was heard from it in that time"
    assert presence.last_activity(1, 1.0) == ""
    assert presence.last_activity(1, 1.0, 10.0) == nothing
    presence.heard(1, 5.0, EVALUATING)
    assert presence.last_activity(1, 30.0) == presence.last_activity(1, 14.0, 10.0) == str(EVALUATING)
    assert presence.last_activity(1, 15.0, 10.0) == nothing
