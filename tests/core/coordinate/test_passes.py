"""A pass from its beginning to its end, and from one to the next, where everybody lives."""

import pytest

from evenstep.core.errors import DisagreementError, ProtocolError
from evenstep.core.sync import Barrier, Bounded, Dynamic, Unbounded


def test_under_asp_a_fast_worker_does_more_of_the_pass_and_its_end_comes_for_all_together(Run):
    run = Run(Unbounded(), length=16)
    assert run.begin(0, 1) == ["0: 0-4", "1: 4-8"]
    assert run.push(1) == ["commit 1", "1: 8-12"]
    assert run.push(1) == ["commit 1", "1: 12-14"]  # towards the end claims shrink
    assert run.push(1) == ["commit 1", "1: 14-15"]
    assert run.push(1) == ["commit 1", "1: 15-16"]
    assert run.push(1) == ["commit 1", "1: nothing"]
    assert run.rest(1) == []
    assert run.push(0) == ["commit 0", "0: over", "1: over"]
    assert sorted(run.positions) == list(range(16))


def test_under_asp_every_commit_stands_for_its_part_of_the_batch_and_counts_what_it_missed(Run):
    run = Run(Unbounded(), length=160)
    run.begin(0, 1)
    run.push(1, 1, 1, 0)
    assert [update.version for update in run.updates] == [1, 2, 3, 4]
    assert [update.share for update in run.updates] == [0.5, 0.5, 0.5, 0.5]
    assert [update.staleness for update in run.updates] == [0, 0, 0, 3]
    assert [update.behind for update in run.updates] == [0.0, 0.0, 0.0, 1.5]


def test_under_ssp_the_fast_worker_is_held_until_the_slow_one_has_pushed(Run):
    run = Run(Bounded(bound=1), length=160)
    run.join(0, 1)
    assert run.begin(0, 1) == ["0: 0-4", "1: 4-8"]
    assert run.push(1) == ["commit 1", "1: 8-12"]
    assert run.push(1) == ["commit 1"]
    run.now = 3.0
    assert run.push(0) == ["commit 0", "0: 12-16", "1: 16-20"]
    assert [release.held_seconds for release in run.releases] == [0, 0, 0, 0, 3]


def test_under_dssp_the_fast_worker_is_given_what_the_controller_grants(Run):
    run = Run(Dynamic(lower=0, upper=2), length=160)
    run.join(0, 1)
    run.begin(0, 1)
    run.now = 1.0
    assert run.push(1) == ["commit 1"]  # nothing is known of worker 0
    run.now = 3.0
    assert run.push(0) == ["commit 0", "0: 8-12", "1: 12-16"]
    run.now = 4.0
    assert run.push(1) == ["commit 1", "1: 16-20"]
    assert run.push(1) == ["commit 1", "1: 20-24"]
    assert run.push(1) == ["commit 1"]


def test_under_a_barrier_an_iteration_is_a_slice_and_a_commit(Run):
    run = Run(Barrier(), length=19, workers=3)
    run.join(0, 1, 2)
    assert run.begin(2, 0) == []
    assert run.begin(1) == ["0: 0-3", "1: 3-6", "2: 6-8"]
    assert run.push(2, 0) == []
    assert run.push(1) == ["commit 0+1+2", "0: 8-11", "1: 11-14", "2: 14-16"]
    assert run.push(0, 1, 2) == ["commit 0+1+2", "0: 16-17", "1: 17-18", "2: 18-19"]
    assert run.push(0, 1, 2) == ["commit 0+1+2", "0: over", "1: over", "2: over"]
    assert [update.share for update in run.updates] == [1.0, 1.0, 1.0]
    assert [weight for _, weight in run.updates[0].pushes] == [3 / 8, 3 / 8, 2 / 8]
    assert run.positions[:8] == [6, 7, 0, 1, 2, 3, 4, 5]


def test_under_a_barrier_whoever_has_no_part_of_the_last_slice_holds_nobody(Run):
    run = Run(Barrier(), length=9)
    run.begin(0)
    assert run.begin(1) == ["0: 0-4", "1: 4-8"]
    assert run.push(0, 1) == ["commit 0+1", "0: 8-9", "1: nothing"]
    assert run.rest(1) == []
    assert run.push(0) == ["commit 0", "0: over", "1: over"]


def test_drop_last_leaves_out_what_fills_no_batch(Run):
    run = Run(Barrier(), length=15, drop_last=True)
    run.begin(0, 1)
    assert run.push(0, 1) == ["commit 0+1", "0: over", "1: over"]
    assert Run(Unbounded(), length=7, drop_last=True).begin(0, 1) == ["0: over", "1: over"]


def test_with_two_claims_in_hand_a_worker_always_has_the_next_one(Run):
    run = Run(Unbounded(), length=18)
    run.join(0, 1)
    assert run.begin(0, 1, ahead=1) == ["0: 0-4 4-8", "1: 8-12 12-15"]
    assert run.push(1) == ["commit 1", "1: 15-17"]
    assert run.push(1) == ["commit 1", "1: 17-18"]
    assert run.push(1) == ["commit 1", "1: nothing"]  # and still one in hand
    assert run.push(0) == ["commit 0", "0: nothing"]
    assert run.push(1) == ["commit 1", "1: nothing"]
    assert run.rest(1) == []
    assert run.push(0) == ["commit 0", "0: over", "1: over"]
    assert sorted(run.positions) == list(range(18))


def test_with_two_claims_in_hand_an_iteration_under_a_barrier_is_still_a_slice(Run):
    run = Run(Barrier(), length=25)
    run.begin(0, ahead=1)
    assert run.begin(1, ahead=1) == ["0: 0-4 8-12", "1: 4-8 12-16"]
    assert run.push(0, 1) == ["commit 0+1", "0: 16-20", "1: 20-24"]
    assert run.push(0, 1) == ["commit 0+1", "0: 24-25", "1: nothing"]
    assert run.push(0, 1) == ["commit 0+1", "0: nothing", "1: nothing"]
    assert run.rest(1) == []
    assert run.push(0) == ["commit 0", "0: over", "1: over"]


def test_an_empty_push_is_discarded_and_its_samples_are_done_with(Run):
    run = Run(Unbounded(), workers=1, length=16)
    assert run.begin(0) == ["0: 0-8"]
    assert run.push(0, samples=0) == ["0: 8-16"]
    assert run.coordinator.claims.finished == 8
    assert (run.coordinator.version, run.coordinator.samples) == (0, 0)


def test_under_a_barrier_empty_pushes_are_waited_for_and_left_out(Run):
    run = Run(Barrier(), length=16)
    run.begin(0, 1)
    assert run.push(0, samples=0) == []
    assert run.push(1) == ["commit 1", "0: 8-12", "1: 12-16"]
    assert run.push(0, samples=0) == []
    assert run.push(1, samples=0) == ["0: over", "1: over"]


def test_the_next_pass_begins_with_whoever_comes_first(Run):
    run = Run(Unbounded(), length=8)
    assert run.begin(0) == ["0: 0-8"]
    assert run.push(0) == ["commit 0", "0: over"]
    assert run.begin(0, number=1) == ["0: 0-8"]
    assert (run.coordinator.passes.number, run.coordinator.passes.epoch) == (1, 1)


def test_a_pass_in_step_begins_only_when_all_have_come(Run):
    run = Run(Barrier(), workers=3, length=8)
    assert run.begin(0) == []  # the others have not even joined
    assert run.begin(1) == []
    assert run.begin(2) == ["0: 0-3", "1: 3-6", "2: 6-8"]
    run.push(0, 1, 2)
    assert run.begin(2, number=1) == []
    assert run.begin(0, number=1) == []
    assert run.leave(1) == ["0: 0-4", "2: 4-8"]  # it alone had not come


def test_whoever_never_comes_is_not_waited_for_once_it_is_given_up(Run):
    run = Run(Barrier(), workers=3, length=8)
    assert run.begin(0, 1) == []
    assert [run.coordinator.awaits(worker) for worker in range(3)] == [False, False, True]
    assert run.leave(2) == ["0: 0-4", "1: 4-8"]
    with pytest.raises(ProtocolError, match="worker 2 has not joined"):
        run.leave(2)


def test_a_late_comer_takes_part_in_the_pass_under_way_and_finds_earlier_ones_over(Run):
    run = Run(Unbounded(), length=32)
    run.begin(0)
    run.push(0)
    run.stop(0)
    assert run.begin(0, number=1) == ["0: 0-8"]
    assert run.begin(1, number=0) == ["1: over"]
    assert run.begin(1, number=1) == ["1: 8-12"]
    assert run.coordinator.passes.number == 1


def test_a_late_comer_for_whom_nothing_is_left_waits_for_the_end(Run):
    run = Run(Unbounded(), length=8)
    assert run.begin(0) == ["0: 0-8"]
    assert run.begin(1) == []
    assert run.push(0) == ["commit 0", "0: over", "1: over"]
    assert run.begin(1, number=0) == ["1: over"]


def test_a_late_comer_under_a_barrier_leaves_the_slices_of_the_others_alone(Run):
    run = Run(Barrier(), workers=3, length=32)
    run.begin(0, 1)
    run.leave(2)
    assert [len(each[0].positions) for each in run.held.values()] == [4, 4]
    assert run.begin(2) == ["2: 8-10"]
    run.push(0, 1)
    assert run.push(2) == ["commit 0+1+2", "0: 10-13", "1: 13-16", "2: 16-18"]


def test_a_break_gives_back_and_the_next_pass_waits_for_those_still_in_this_one(Run):
    run = Run(Unbounded(), length=16)
    run.join(0, 1)
    assert run.begin(0, 1) == ["0: 0-4", "1: 4-8"]
    assert run.stop(0) == []
    assert run.begin(0, number=1) == []
    assert run.push(1) == ["commit 1", "1: 0-4"]  # what worker 0 had
    assert run.push(1, 1, 1) == ["commit 1", "1: 8-12", "commit 1", "1: 12-14", "commit 1", "1: 14-15"]
    assert run.push(1) == ["commit 1", "1: 15-16"]
    assert run.push(1) == ["commit 1", "1: over", "0: 0-4"]


def test_a_break_by_all_ends_a_pass_unfinished(Run):
    run = Run(Unbounded(), length=16)
    run.begin(0, 1)
    run.stop(0)
    assert run.begin(0, number=1) == []
    assert run.stop(1) == ["0: 0-4"]
    assert run.coordinator.passes.number == 1


def test_the_next_pass_waits_for_a_worker_that_is_about_to_rest_in_this_one(Run):
    run = Run(Unbounded(), length=8)
    run.join(0, 1)
    assert run.begin(0, 1) == ["0: 0-4", "1: 4-6"]
    assert run.push(1) == ["commit 1", "1: 6-7"]
    assert run.push(1) == ["commit 1", "1: 7-8"]
    assert run.push(1) == ["commit 1", "1: nothing"]
    run.stop(0)
    assert run.begin(0, number=1) == []
    assert run.rest(1) == ["1: 0-2"]


def test_a_break_under_a_barrier_lets_the_others_run_on(Run):
    run = Run(Barrier(), length=24)
    run.begin(0, 1)
    assert run.push(0) == []
    assert run.stop(1) == ["commit 0", "0: 4-8"]


def test_beginning_anew_gives_up_what_was_begun(Run):
    run = Run(Unbounded(), length=16)
    run.join(0, 1)
    assert run.begin(0, 1) == ["0: 0-4", "1: 4-8"]
    assert run.begin(0) == ["0: 0-4"]
    run.begin(0, number=2)
    assert run.begin(0, number=1) == []
    assert run.stop(1) == ["0: 0-4"]
    assert run.coordinator.passes.number == 1


def test_workers_that_run_a_pass_as_different_epochs_are_told_so(Run):
    run = Run(Unbounded(), length=16)
    run.join(0, 1)
    run.begin(0, number=0, epoch=4)
    with pytest.raises(DisagreementError, match="runs its loop 0 as epoch 5 where the others run epoch 4"):
        run.begin(1, number=0, epoch=5)
    run.begin(1, number=1, epoch=9)
    run.stop(1)
    run.begin(1, number=1, epoch=5)  # nobody else waits for it any more
    with pytest.raises(DisagreementError, match="loop over the same epochs"):
        run.begin(0, number=1, epoch=9)
    assert run.coordinator.passes.epoch == 4


def test_what_cannot_be_is_refused(Run):
    run = Run(Bounded(bound=0), length=64)
    run.join(0, 1)
    with pytest.raises(ProtocolError, match="joined although it is here"):
        run.join(0)
    with pytest.raises(ProtocolError, match="worker 5 has not joined"):
        run.coordinator.begin(5, 0, 0, 0.0)
    with pytest.raises(ProtocolError, match="worker 5 has not joined"):
        run.leave(5)
    with pytest.raises(ProtocolError, match="worker 5 has not joined"):
        run.stop(5)
    with pytest.raises(ProtocolError, match="is not in the pass"):
        run.rest(0)
    run.begin(0, 1)
    with pytest.raises(ProtocolError, match="has finished the claim 9, but holds"):
        run.coordinator.rest(0, 0.0, done=9)
    run.join(2)
    with pytest.raises(ProtocolError, match="asked for more samples than those"):
        run.more(2)
    with pytest.raises(ProtocolError, match="pushed on version 3, but was given"):
        run.push(0, version=3)
    run.held[0], run.held[1] = run.held[1], run.held[0]
    with pytest.raises(ProtocolError, match="has finished the claim 1, but holds"):
        run.push(0)


def test_a_held_worker_with_a_claim_in_hand_may_not_push_it(Run):
    run = Run(Bounded(bound=0), length=64)
    run.begin(0, 1, ahead=1)
    run.push(0)
    finished = run.coordinator.claims.finished
    with pytest.raises(ProtocolError, match="while it is held"):
        run.push(0)
    assert run.coordinator.claims.finished == finished
    run.push(1)
    assert run.push(0) == ["commit 0"]


def test_a_worker_computes_on_the_weights_that_it_was_given_last_or_with_ahead_before(Run):
    for ahead in (0, 1):
        run = Run(Unbounded(), workers=1, length=640)
        run.begin(0, ahead=ahead)
        run.push(0, 0, 0)
        with pytest.raises(ProtocolError, match="pushed on version"):
            run.push(0, version=2 - ahead)
        run.push(0, version=3 - ahead)
        assert run.updates[-1].staleness == ahead


def test_a_worker_that_fetches_ahead_has_as_many_claims_after_each_push(Run):
    run = Run(Unbounded(), length=32)
    run.join(0, 1)
    assert run.begin(0, 1) == ["0: 0-4", "1: 4-8"]
    assert run.more(0) == ["0 also: 8-12"]
    assert run.more(0) == ["0 also: nothing"]
    assert run.push(0) == ["commit 0", "0: 12-16"]
    assert run.more(0, 3) == ["0 also: 16-20 20-24"]
    assert run.push(0) == ["commit 0", "0: 24-28"]
    assert [update.staleness for update in run.updates] == [0, 0]


def test_a_worker_that_fetches_ahead_is_told_at_once_if_nothing_is_left(Run):
    run = Run(Bounded(bound=0), length=8)
    run.join(0, 1)
    assert run.begin(0, 1) == ["0: 0-4", "1: 4-6"]
    assert run.more(0, 2) == ["0 also: 6-7 7-8"]
    assert run.more(1) == ["1 also: nothing"]
    assert run.push(0) == ["commit 0"]  # held, as without claims ahead
    assert run.push(1) == ["commit 1", "1: nothing", "0: nothing"]
    assert run.push(0, 0) == ["commit 0", "0: nothing", "commit 0", "0: over"]


def test_a_push_is_the_last_word_on_the_older_claims(Run):
    run = Run(Unbounded(), workers=1, length=32)
    assert run.begin(0) == ["0: 0-8"]
    run.more(0, 2)
    assert run.push(0, skips=1) == ["commit 0", "0: 24-32"]
    assert run.coordinator.claims.finished == 16
    assert run.push(0, skips=1, samples=0) == ["0: over"]


def test_a_worker_may_be_done_with_what_it_holds_without_a_push_and_the_rest_goes_back(Run):
    run = Run(Unbounded(), length=16)
    run.join(0, 1)
    run.begin(0, 1)
    assert run.more(0) == ["0 also: 8-12"]
    assert run.rest(0, done=1) == ["0: 8-12 12-14"]
    assert run.coordinator.claims.finished == 4


def test_a_worker_whose_loop_has_ended_waits_for_the_end_and_takes_nothing(Run):
    run = Run(Unbounded(), length=8)
    run.join(0, 1)
    assert run.begin(0, 1) == ["0: 0-4", "1: 4-6"]
    assert run.more(0) == ["0 also: 6-7"]
    assert run.push(1) == ["commit 1", "1: 7-8"]
    run.push(0, 0)
    assert run.rest(0, ended=True) == []
    assert run.coordinator.waited_for() == [1]
    assert run.push(1) == ["commit 1", "1: over", "0: over"]


def test_what_is_given_back_after_all_loops_have_ended_is_left_out(Run):
    run = Run(Unbounded(), length=8)
    run.join(0, 1)
    run.begin(0, 1)
    run.push(0, 0)
    assert run.rest(0, ended=True) == []
    assert run.leave(1) == ["0: over"]
    assert run.begin(0, number=1) == ["0: 0-8"]
