import numpy as np
import pytest

from evenstep.core.sync import Barrier, Bounded, Commit, Dynamic, Unbounded

FAST_ITERATIONS = 5_000.0


def jittered(seed, workers=4):
    """Compute seconds of (worker, iteration): lasting differences and noise; no two pushes at one time."""
    generator = np.random.default_rng(seed)
    table = np.exp(generator.normal(0.0, 0.5, (workers, 1)) + generator.normal(0.0, 0.3, (workers, 2_000)))
    return table, lambda worker, iteration: float(table[worker, iteration])


def releases_by_recursion(table, bound, until):
    """SSP's release times without events: push k of i is answered when everyone has pushed k - bound."""
    workers = len(table)
    pushed = np.zeros((workers, 1))
    released = np.zeros((workers, 1))
    for k in range(table.shape[1]):
        pushed = np.column_stack([pushed, released[:, k] + table[:, k]])
        slowest = pushed[:, max(k + 1 - bound, 0)].max()
        released = np.column_stack([released, np.maximum(pushed[:, k + 1], slowest)])
    return sorted(
        (float(released[i, k]), i, k)
        for i in range(workers)
        for k in range(table.shape[1] + 1)
        if released[i, k] <= until
    )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("bound", [0, 1, 3])
def test_bounded_releases_at_the_times_of_the_recursion(drive, seed, bound):
    table, seconds = jittered(seed)
    run = drive(Bounded(bound=bound).policy(4), seconds, 4, 100.0)
    expected = releases_by_recursion(table, bound, 100.0)
    assert [(i, k) for _, i, k in sorted(run.releases)] == [(i, k) for _, i, k in expected]
    assert np.allclose([now for now, *_ in sorted(run.releases)], [now for now, *_ in expected])


@pytest.mark.parametrize("seed", range(20))
def test_bounded_by_zero_has_the_release_times_of_a_barrier(drive, seed):
    _, seconds = jittered(seed)
    barrier = drive(Barrier().policy(4), seconds, 4, 50.0)
    bounded = drive(Bounded(bound=0).policy(4), seconds, 4, 50.0)
    assert sorted(barrier.releases) == sorted(bounded.releases)
    assert barrier.watched.held_seconds == bounded.watched.held_seconds


def test_an_iteration_of_a_barrier_takes_as_long_as_the_slowest_worker(drive):
    table, seconds = jittered(0)
    run = drive(Barrier().policy(4), seconds, 4, 100.0)
    ends = np.cumsum(table.max(axis=0))
    assert np.allclose([now for now, worker, done in run.releases if worker == 0 and done], ends[ends <= 100.0])
    commits = [command for command in run.commands if isinstance(command, Commit)]
    assert all([push.worker for push in commit.pushes] == [0, 1, 2, 3] for commit in commits)
    assert len(commits) == np.count_nonzero(ends <= 100.0)


@pytest.mark.parametrize("limit", [0, 1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_dynamic_without_a_range_is_bounded_event_for_event(drive, limit, seed):
    _, seconds = jittered(seed)
    bounded = drive(Bounded(bound=limit).policy(4), seconds, 4, 100.0)
    dynamic = drive(Dynamic(lower=limit, upper=limit).policy(4), seconds, 4, 100.0)
    assert bounded.commands == dynamic.commands
    assert bounded.releases == dynamic.releases


def two_workers(drive, part, ratio):
    return drive(part.policy(4), lambda worker, iteration: ratio if worker else 1.0, 2, FAST_ITERATIONS)


@pytest.mark.parametrize("ratio", [2.0, 2.17])
@pytest.mark.parametrize("part", [Bounded(bound=3), Dynamic(lower=3, upper=15)])
def test_a_bounded_lead_makes_the_fast_worker_wait_for_the_slow_one(drive, part, ratio):
    run = two_workers(drive, part, ratio)
    assert run.waiting_share(0) == pytest.approx(1.0 - 1.0 / ratio, abs=0.005)  # 0.50 and 0.54
    assert run.waiting_share(1) == 0.0
    assert run.watched.largest_lead <= 15


def test_the_clamped_dynamic_bound_reaches_its_upper_limit_and_no_more(drive):
    run = two_workers(drive, Dynamic(lower=3, upper=15), 40.0)
    assert run.watched.largest_lead == 15  # at a release; the push after it leads by 16


@pytest.mark.parametrize("ratio", [2.0, 2.17])
@pytest.mark.parametrize("part", [Dynamic(lower=3, upper=15, bounded=False), Unbounded()])
def test_without_a_bound_the_fast_worker_hardly_waits_and_its_lead_grows(drive, part, ratio):
    run = two_workers(drive, part, ratio)
    assert run.waiting_share(0) <= 0.003
    assert run.watched.largest_lead >= 0.99 * FAST_ITERATIONS * (1.0 - 1.0 / ratio)


def test_an_unbounded_worker_pushes_at_its_own_speed(drive):
    run = drive(Unbounded().policy(4), lambda worker, iteration: (1.0, 2.0, 4.0)[worker], 3, 100.0)
    assert run.watched.pushes == {0: 100, 1: 50, 2: 25}


def test_of_nearly_equal_workers_with_jitter_the_more_freedom_the_more_pushes(drive):
    means = np.array([0.98, 0.99, 1.01, 1.02])
    table = means[:, None] * (1.0 + 0.1 * np.random.default_rng(0).standard_normal((4, 4_000)).clip(-5, 5))
    pushes = [
        sum(drive(part.policy(4), lambda i, k: float(table[i, k]), 4, 2_000.0).watched.pushes.values())
        for part in (Barrier(), Bounded(bound=3), Dynamic(lower=3, upper=15), Unbounded())
    ]
    assert pushes[0] < pushes[1] < pushes[3]
    assert pushes[2] == pytest.approx(pushes[1], rel=0.005)  # indistinguishable: ALGORITHMS.md 5d


def test_the_same_events_lead_to_the_same_commands_and_others_to_others(drive):
    _, seconds = jittered(1)
    _, others = jittered(2)
    part = Dynamic(lower=1, upper=4)
    assert drive(part.policy(4), seconds, 4, 50.0) == drive(part.policy(4), seconds, 4, 50.0)
    assert drive(part.policy(4), seconds, 4, 50.0).releases != drive(part.policy(4), others, 4, 50.0).releases
