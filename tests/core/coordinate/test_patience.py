"""Who is waited for, and who has been for too long."""

from evenstep.core.coordinate import Patience
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


def test_patience_counts_from_when_others_began_to_wait():
    patience = Patience()
    patience.joined(1, 10.0)
    assert patience.exceeded([], 100.0) == []
    assert patience.exceeded([1], 101.0) == []
    assert patience.exceeded([1], 111.0) == []
    assert patience.exceeded([1], 111.5) == [1]


def test_a_request_or_a_moment_without_anybody_waiting_starts_over():
    patience = Patience()
    patience.joined(1, 10.0)
    for start_over in (lambda: patience.asked(1), lambda: patience.exceeded([], 5.0), patience.start_over):
        patience.exceeded([1], 0.0)
        start_over()
        assert patience.exceeded([1], 11.0) == []
        assert patience.exceeded([1], 22.0) == [1]
        patience.asked(1)


def test_a_worker_that_left_is_not_waited_for():
    patience = Patience()
    patience.joined(1, 10.0)
    patience.exceeded([1], 0.0)
    patience.left(1)
    assert patience.exceeded([1], 20.0) == []
