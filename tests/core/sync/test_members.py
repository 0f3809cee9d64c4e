import json
from functools import partial

import pytest

import evenstep.core.sync as sync
from evenstep.core.errors import ConfigError, ProtocolError
from evenstep.core.groups import ByRank
from evenstep.core.sync import Barrier, Bounded, Commit, Dynamic, Grouped, Push, Release, Unbounded
from evenstep.testing.conformance import check_sync_policy

UNDER_TEST = {
    "barrier": Barrier(),
    "bounded by 0": Bounded(bound=0),
    "bounded": Bounded(),
    "dynamic": Dynamic(),
    "dynamic from 0": Dynamic(lower=0, upper=2),
    "dynamic without a range": Dynamic(lower=2, upper=2),
    "dynamic without a bound": Dynamic(lower=1, upper=4, bounded=False),
    "unbounded": Unbounded(),
    "grouped": Grouped(grouping=ByRank(1)),  # more groups have leads of their own: test_grouped.py
}


def push(worker, iteration=0, samples=4):
    return Push(worker=worker, iteration=iteration, samples=samples, units=samples, share=samples / 16, version=0)


def joined(part, workers):
    policy = part.policy(workers)
    for worker in range(workers):
        policy.on_join(worker, 0.0)
    return policy


def release(worker, lead, bound, held_seconds=0.0):
    return Release(worker=worker, lead=lead, bound=bound, held_seconds=held_seconds)


def alone(pushed):
    return Commit(pushes=(pushed,), share=pushed.share)


@pytest.mark.parametrize("name", UNDER_TEST)
@pytest.mark.parametrize("workers", [2, 3, 8])
def test_conforms(name, workers):
    check_sync_policy(partial(UNDER_TEST[name].policy, workers), workers=workers)


def test_every_public_member_is_under_test():
    members = {name for name in sync.__all__ if hasattr(getattr(sync, name), "policy") and name != "Sync"}
    assert members == {type(part).__name__ for part in UNDER_TEST.values()}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(Bounded, bound=-1), "a lead of -1: use a bound of 0 or more"),
        (partial(Dynamic, lower=-1), "a lead of -1: use a lower of 0 or more"),
        (partial(Dynamic, lower=4, upper=3), "from 4 to 3: use an upper of at least lower"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (lambda policy: policy.on_join(1, 1.0), "worker 1 joined while it is running"),
        (lambda policy: policy.on_join(0, 1.0), "worker 0 joined while it is held"),
        (lambda policy: policy.on_push(push(0, 7), 1.0), "worker 0 pushed its iteration 7 while it is held"),
        (lambda policy: policy.on_push(push(9, 7), 1.0), "worker 9 pushed its iteration 7 while it is not joined"),
        (lambda policy: policy.on_leave(9, 1.0), "worker 9 left while it is not joined"),
    ],
)
def test_an_impossible_event_names_worker_state_and_event(event, message):
    policy = joined(Bounded(bound=0), 2)
    policy.on_push(push(0), 1.0)
    with pytest.raises(ProtocolError, match=message):
        event(policy)


def test_a_barrier_commits_all_as_one_in_order_of_rank_and_then_releases_all():
    policy = joined(Barrier(), 3)
    assert policy.on_push(push(2), 1.0) == []
    assert policy.on_push(push(0), 2.0) == []
    assert policy.on_push(push(1), 4.0) == [
        Commit(pushes=(push(0), push(1), push(2)), share=1.0),
        release(0, 0, 0, held_seconds=2.0),
        release(1, 0, 0),
        release(2, 0, 0, held_seconds=3.0),
    ]


def test_a_barrier_waits_for_empty_pushes_and_leaves_them_out():
    policy = joined(Barrier(), 2)
    policy.on_push(push(0, samples=0), 1.0)
    assert policy.on_push(push(1), 1.0) == [
        Commit(pushes=(push(1),), share=1.0),
        release(0, 0, 0),
        release(1, 0, 0),
    ]


def test_a_barrier_of_empty_pushes_commits_nothing():
    policy = joined(Barrier(), 2)
    policy.on_push(push(0, samples=0), 1.0)
    assert policy.on_push(push(1, samples=0), 1.0) == [release(0, 0, 0), release(1, 0, 0)]


def test_a_push_whose_worker_has_left_is_committed_with_the_others():
    policy = joined(Barrier(), 3)
    policy.on_push(push(0), 1.0)
    policy.on_push(push(1), 1.0)
    assert policy.on_leave(0, 1.0) == []
    assert policy.on_leave(2, 1.0) == [Commit(pushes=(push(0), push(1)), share=1.0), release(1, 0, 0)]


def test_the_last_to_leave_a_barrier_leaves_no_push_uncommitted():
    policy = joined(Barrier(), 2)
    policy.on_push(push(0), 1.0)
    assert policy.on_leave(0, 1.0) == []
    assert policy.on_leave(1, 1.0) == [Commit(pushes=(push(0),), share=1.0)]
    assert policy.on_join(1, 2.0) == [release(1, 0, 0)]


def test_who_joins_a_barrier_in_the_middle_of_an_iteration_takes_part_in_it():
    policy = joined(Barrier(), 2)
    policy.on_push(push(0), 1.0)
    assert policy.on_join(2, 1.0) == [release(2, 0, 0)]
    assert policy.on_push(push(1), 1.0) == []
    assert len(policy.on_push(push(2), 1.0)[0].pushes) == 3


def test_a_bounded_worker_waits_for_the_slowest_at_the_bound():
    policy = joined(Bounded(bound=1), 2)
    assert policy.on_push(push(0, 0), 1.0) == [alone(push(0, 0)), release(0, 1, 1)]
    assert policy.on_push(push(0, 1), 2.0) == [alone(push(0, 1))]
    assert policy.on_push(push(1, 0), 5.0) == [alone(push(1, 0)), release(1, 0, 1), release(0, 1, 1, held_seconds=3.0)]


@pytest.mark.parametrize("part", [Bounded(bound=1), Dynamic(lower=1, upper=1), Unbounded()])
def test_an_empty_push_counts_as_an_iteration_and_commits_nothing(part):
    policy = joined(part, 2)
    (answer,) = policy.on_push(push(0, samples=0), 1.0)
    assert (answer.worker, answer.lead) == (0, 1)


@pytest.mark.parametrize(
    "part", [Bounded(bound=1), Dynamic(lower=1, upper=1), Dynamic(lower=1, upper=1, bounded=False)]
)
def test_the_held_run_on_when_the_slowest_leaves(part):
    policy = joined(part, 3)
    for iteration in range(2):
        policy.on_push(push(0, iteration), 1.0)
    policy.on_push(push(1, 0), 1.0)
    assert policy.on_leave(2, 3.0) == [release(0, 1, 1, held_seconds=2.0)]


def test_held_workers_are_released_those_behind_first_and_then_the_first_that_came():
    policy = joined(Bounded(bound=0), 4)
    for worker in (2, 0, 1):
        policy.on_push(push(worker), 1.0)
    assert [command.worker for command in policy.on_leave(3, 1.0)] == [2, 0, 1]


def test_who_joins_is_level_with_the_slowest():
    policy = joined(Bounded(bound=1), 2)
    for iteration in range(2):
        for worker in (0, 1):
            policy.on_push(push(worker, iteration), 1.0)
    assert policy.on_join(2, 1.0) == [release(2, 0, 1)]
    assert policy.on_push(push(2), 1.0)[1] == release(2, 1, 1)


def test_iterations_count_anew_when_all_have_left():
    policy = joined(Bounded(bound=1), 1)
    policy.on_push(push(0), 1.0)
    policy.on_leave(0, 1.0)
    joined_again = [policy.on_join(worker, 2.0) for worker in (0, 1)]
    assert joined_again == [[release(0, 0, 1)], [release(1, 0, 1)]]
    assert policy.on_push(push(0, 1), 3.0)[1] == release(0, 1, 1)


def test_an_unbounded_worker_never_waits():
    policy = joined(Unbounded(), 2)
    for iteration in range(100):
        assert policy.on_push(push(0, iteration), 1.0) == [alone(push(0, iteration)), release(0, iteration + 1, None)]


def test_a_checkpoint_of_dynamic_keeps_the_intervals():
    policy = joined(Dynamic(lower=1, upper=5), 2)
    policy.on_push(push(0), 1.0)
    policy.on_push(push(1), 4.0)
    resumed = Dynamic(lower=1, upper=5).policy(4)
    resumed.load_state_dict(json.loads(json.dumps(policy.state_dict())))
    for worker in (0, 1):
        resumed.on_join(worker, 10.0)
    resumed.on_push(push(0, 1), 11.0)
    assert resumed.on_push(push(0, 2), 12.0)[1] == release(0, 2, 3)  # the slowest is due in 2 s, so 2 iterations more
