"""Workers die, at every point of an iteration, and return; and the servers are started from a snapshot."""

import json

from evenstep.core.load import Experts
from evenstep.core.sync import Barrier, Bounded, Unbounded
from evenstep.core.values import UNLIMITED


def test_the_claims_of_a_dead_worker_are_handed_out_again_before_anything_new(Run):
    run = Run(Unbounded(), length=32)
    run.join(0, 1)
    assert run.begin(0, 1, ahead=1) == ["0: 0-4 4-8", "1: 8-12 12-16"]
    assert run.leave(1) == []
    assert run.push(0) == ["commit 0", "0: 8-16"]  # it alone shares the batch now


def test_the_claims_of_a_dead_worker_go_to_one_that_rests(Run):
    run = Run(Unbounded(), workers=3, batch=12, length=12)
    run.join(0, 1, 2)
    assert run.begin(0, 1, 2) == ["0: 0-4", "1: 4-7", "2: 7-9"]
    assert run.push(1) == ["commit 1", "1: 9-10"]
    assert run.push(2) == ["commit 2", "2: 10-11"]
    assert run.push(2) == ["commit 2", "2: 11-12"]
    run.push(1, 2)
    assert run.rest(2, 1) == []
    assert run.leave(0) == ["2: 0-2", "1: 2-4"]  # the one that rests longest comes first
    assert run.push(2) == ["commit 2", "2: nothing"]
    assert run.push(1) == ["commit 1", "1: over"]
    assert run.rest(2) == ["2: over"]


def test_no_more_of_those_that_rest_are_woken_than_there_is_work_for(Run):
    run = Run(Unbounded(), workers=4, batch=4, length=4)
    run.join(0, 1, 2, 3)
    run.begin(0, 1, 2, 3)
    run.push(1, 2, 3)
    run.rest(1, 2, 3)
    assert run.leave(0) == ["1: 0-1"]
    assert run.push(1) == ["commit 1", "1: over", "2: over", "3: over"]


def test_under_a_barrier_the_push_of_a_worker_that_died_after_it_is_committed_once(Run):
    run = Run(Barrier(), workers=3, batch=12, length=24)
    run.begin(0, 1, 2)
    assert run.push(0) == []
    assert run.leave(0) == []
    assert run.push(1) == []
    assert run.push(2) == ["commit 0+1+2", "1: 12-18", "2: 18-24"]
    assert run.push(1, 2) == ["commit 1+2", "1: over", "2: over"]


def test_a_worker_may_die_return_and_die_again_within_one_iteration_of_a_barrier(Run):
    run = Run(Barrier(), workers=2, length=24)
    run.begin(0, 1)
    run.push(0)
    run.leave(0)
    assert run.begin(0) == ["0: 8-12"]
    run.push(0)
    run.leave(0)
    assert run.begin(0) == ["0: 12-16"]
    assert run.leave(0) == []
    assert run.push(1) == ["commit 0+0+1", "1: 12-20"]


def test_under_a_barrier_the_death_of_the_last_to_come_lets_the_others_run_on_whole_slices(Run):
    run = Run(Barrier(), workers=3, batch=12, length=36)
    run.begin(0, 1, 2)
    run.push(0, 1)
    assert run.leave(2) == ["commit 0+1", "0: 8-14", "1: 14-20"]


def test_a_worker_that_dies_while_it_is_held_holds_nobody(Run):
    run = Run(Bounded(bound=0), workers=3, batch=12, length=120)
    run.join(0, 1, 2)
    run.begin(0, 1, 2)
    run.push(0)
    assert run.leave(0) == []
    assert run.push(1) == ["commit 1"]
    assert run.push(2) == ["commit 2", "2: 12-18", "1: 18-24"]


def test_when_the_slowest_dies_those_held_run_on(Run):
    run = Run(Bounded(bound=1), workers=3, batch=12, length=120)
    run.join(0, 1, 2)
    run.begin(0, 1, 2)
    assert run.push(0, 1, 0, 1) == ["commit 0", "0: 12-16", "commit 1", "1: 16-20", "commit 0", "commit 1"]
    assert run.leave(2) == ["0: 8-12 20-22", "1: 22-28"]


def test_a_worker_that_rests_or_has_no_more_to_do_holds_nobody(Run):
    run = Run(Bounded(bound=0), workers=2, batch=8, length=10)
    run.join(0, 1)
    assert run.begin(0, 1) == ["0: 0-4", "1: 4-7"]
    run.stop(0)
    assert run.push(1, 1, 1, 1) == [
        *("commit 1", "1: 0-4"),
        *("commit 1", "1: 7-9"),
        *("commit 1", "1: 9-10"),
        *("commit 1", "1: over"),
    ]


def test_a_worker_that_has_finished_its_script_holds_nobody(Run):
    run = Run(Bounded(bound=0), length=8)
    run.join(0, 1)
    run.begin(0, 1)
    run.leave(1)
    assert run.push(0) == ["commit 0", "0: 4-8"]
    assert run.push(0) == ["commit 0", "0: over"]
    assert run.begin(0, number=1) == ["0: 0-8"]


def test_a_worker_that_returns_goes_on_in_the_same_pass_level_with_the_slowest(Run):
    run = Run(Bounded(bound=1), length=80)
    run.join(0, 1)
    run.begin(0, 1)
    run.push(0, 1, 0)
    run.leave(1)
    assert run.begin(1) == ["1: 12-16"]
    assert run.releases[-1].lead == 0


def test_a_run_goes_on_from_a_snapshot_with_what_was_not_committed_done_again(Run):
    run = Run(Bounded(bound=2), length=40)
    run.join(0, 1)
    run.begin(0, 1, number=3, epoch=5, ahead=1)
    run.push(0, 0, 1)
    again = Run(Bounded(bound=2), length=40)
    again.coordinator.load_state_dict(json.loads(json.dumps(run.coordinator.state_dict())))
    assert (again.coordinator.version, again.coordinator.samples, again.coordinator.claims.finished) == (3, 12, 12)
    assert (again.coordinator.passes.number, again.coordinator.passes.epoch) == (3, 5)
    assert again.begin(0, number=3, epoch=5) == ["0: 12-20"]
    assert again.push(0, 0, 0, 0)[-1] == "0: over"
    assert sorted(run.positions + again.positions) == list(range(40))
    assert again.begin(1, number=3, epoch=5) == ["1: over"]


def test_in_step_a_run_goes_on_from_a_snapshot_when_all_are_back(Run):
    run = Run(Barrier(), length=24)
    run.begin(0, 1)
    run.push(0, 1, 0)
    again = Run(Barrier(), length=24)
    again.coordinator.load_state_dict(json.loads(json.dumps(run.coordinator.state_dict())))
    assert again.begin(1) == []
    assert again.begin(0) == ["0: 8-12", "1: 12-16"]
    again.push(0, 1)
    third = Run(Barrier(), length=24)
    third.coordinator.load_state_dict(json.loads(json.dumps(again.coordinator.state_dict())))
    assert third.begin(0) == []
    assert third.leave(1) == ["0: 16-24"]


def test_what_was_known_of_the_speeds_is_known_again_when_the_same_workers_are_back(Run):
    load = Experts(predictor="last", change_cost=0.0, warmup=0)
    run = Run(Unbounded(), length=80, load=load)
    run.join(0, 1)
    run.begin(0, 1)
    run.push(0, row=(4, 12, 0, UNLIMITED))
    run.push(1, row=(4, 4, 0, UNLIMITED))
    assert run.coordinator.sizes.all() == {0: 2, 1: 6}
    again = Run(Unbounded(), length=80, load=load)
    again.coordinator.load_state_dict(json.loads(json.dumps(run.coordinator.state_dict())))
    again.begin(0)
    assert again.coordinator.sizes.all() == {0: 8}
    again.begin(1)
    assert again.coordinator.sizes.all() == {0: 2, 1: 6}
