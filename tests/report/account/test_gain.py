"""How many times as fast as with equal sizes: runs of which that is known, and what they do not tell."""

import numpy as np
import pytest
from support.made_meetings import BATCH, START, made, meetings_of

from evenstep.report.account.account import Account

SPEEDS = (1.0, 1.0, 2.0, 4.0)


def constant(speeds=SPEEDS, iterations=60):
    return np.tile(speeds, (iterations, 1))


def episodes(iterations=120):
    """A worker is three times slower now and then."""
    slowness = np.ones((iterations, 4))
    slowness[30:60, 3] = slowness[90:110, 1] = 3.0
    return slowness


def first_slow():
    slowness = constant()
    slowness[0] *= 8
    return slowness


def warming():
    slowness = constant()
    slowness[:2] *= 1.4
    return slowness


def account_of(meetings):
    account = Account(len(meetings.samples), BATCH)
    account.take(meetings)
    return account


def claimed(run):
    return account_of(run.meetings).gain.speed_up


@pytest.mark.parametrize("fixed", [0.0, 0.5])
def test_the_gain_of_exact_times_is_exact_whatever_the_fixed_part(fixed):
    run = made(constant(), fixed=fixed)
    assert run.gained > 1.5
    assert claimed(run).estimate == pytest.approx(run.gained, rel=0.01)


@pytest.mark.parametrize(
    "about",
    [
        {"slowness": constant(), "noise": 0.02},
        {"slowness": constant(), "noise": 0.05},
        {"slowness": constant(), "noise": 0.15},
        {"slowness": constant(), "noise": 0.02, "fixed": 0.5},
        {"slowness": constant(), "noise": 0.05, "fixed": 0.5},
        {"slowness": constant(), "noise": 0.15, "fixed": 0.5},
        {"slowness": constant((1.0, 1.0, 1.0, 1.0)), "noise": 0.05},
        {"slowness": constant((1.0, 1.0, 1.0, 1.0)), "noise": 0.15, "fixed": 0.5},
        {"slowness": episodes(), "noise": 0.05},
        {"slowness": episodes(), "noise": 0.05, "fixed": 0.3},
        {"slowness": first_slow(), "noise": 0.05},
        {"slowness": warming(), "noise": 0.02},
        {"slowness": warming(), "noise": 0.05},
        {"slowness": constant(iterations=120), "noise": 0.05, "compiling": 0.5},
    ],
)
def test_the_interval_holds_the_truth_about_as_often_as_it_says(about):
    held, widths = 0, []
    for seed in range(20):
        run = made(**about, seed=seed)
        interval = claimed(run)
        held += interval.low <= run.gained <= interval.high
        widths.append((interval.high - interval.low) / run.gained)
    assert held >= 18
    assert np.median(widths) <= 0.35 or about["noise"] > 0.1 or "compiling" in about


def test_a_run_with_equal_sizes_gains_nothing_over_them():
    assert str(claimed(made(constant(), noise=0.1, balanced=False))) == "1.00"


def test_equal_workers_gain_nothing_though_sizes_follow_their_noise():
    interval = claimed(made(constant((1.0,) * 4), noise=0.05))
    assert interval.low > 0.97
    assert interval.high < 1.03


def test_sizes_that_never_change_leave_open_whether_time_follows_them():
    sizes = np.array([90.0, 90.0, 40.0, 20.0])
    interval = claimed_of(sizes, np.tile([0.1, 0.1, 0.1, 0.1], (60, 1)))
    assert interval.low == pytest.approx(1.0, abs=0.01)
    assert interval.high == pytest.approx(60 / 20, rel=0.05)


def claimed_of(sizes, compute):
    return account_of(meetings_of(np.broadcast_to(sizes, compute.shape), compute, comm=0.0)).gain.speed_up


def test_a_load_that_changes_right_before_its_sizes_do_hides_nothing():
    # Worker 3 gets less an iteration after it was slowed, so that its times before and after are about the same.
    slowness = constant((1.0, 1.0, 1.0, 1.0))
    sizes = np.array([[60.0] * 4] * 21 + [[75.0, 75.0, 60.0, 30.0]] * 39)
    slowness[20:, 3] = 2.0
    account = account_of(meetings_of(sizes, 0.1 * slowness * sizes / 60))
    assert account.gain.elasticity.medians == pytest.approx([1.0] * 4, abs=0.1)


def test_sizes_that_follow_single_slow_iterations_do_not_look_like_times_that_follow_sizes():
    found = []
    for seed in range(10):
        noise = np.random.default_rng(seed).lognormal(0.0, 0.3, (200, 2))
        sizes = np.full((200, 2), BATCH / 2)
        for number in range(2, 200):
            paces = noise[number - 1]  # As the last iteration was, though the next is not.
            sizes[number] = BATCH * paces[::-1] / paces.sum()
        account = account_of(meetings_of(sizes, 0.1 * noise * (0.8 + 0.2 * sizes / 120)))
        found += account.gain.elasticity.medians.tolist()
    assert np.median(found) == pytest.approx(0.2, abs=0.15)


def test_time_that_others_take_whatever_the_size_is_not_surely_gained():
    held = 0
    for seed in range(20):
        generator = np.random.default_rng(seed)
        busy = np.repeat(generator.random((6, 2)) < 0.3, 30, axis=0)
        stalls = np.where(busy, generator.exponential(0.06, busy.shape), 0.0)
        sizes, compute = np.full((180, 2), BATCH / 2), np.zeros((180, 2))
        for number in range(180):
            if number:
                speeds = sizes[number - 1] / compute[number - 1]
                sizes[number] = np.clip(BATCH * speeds / speeds.sum(), BATCH / 20, BATCH * 19 / 20)
            compute[number] = 0.005 + 0.032 * sizes[number] / (BATCH / 2) + stalls[number]
        held += claimed_of(sizes, compute).low <= (0.037 + stalls.max(axis=1)).sum() / compute.max(axis=1).sum()
    assert held >= 18


def test_the_short_last_slices_of_epochs_count_and_tell_of_the_fixed_part():
    totals = [BATCH] * 9 + [BATCH // 3]
    run = made(constant(), fixed=0.4, noise=0.02, totals=totals * 6)
    interval = claimed(run)
    assert interval.low <= run.gained <= interval.high
    account = account_of(made(constant(), fixed=0.4, noise=0.02, totals=totals * 6, balanced=False).meetings)
    assert account.gain.elasticity.medians == pytest.approx([0.6] * 4, abs=0.1)


def test_a_worker_without_samples_is_as_fast_as_when_it_had_some():
    sizes = np.array([[120.0, 120.0]] * 5 + [[240.0, 0.0]] * 45)
    compute = np.where(sizes > 0, sizes * [0.001, 0.004], 0.0)
    account = account_of(meetings_of(sizes, compute, comm=0.0))
    assert account.gain.speed_up.estimate == pytest.approx(0.48 * 50 / (5 * 0.48 + 45 * 0.24), rel=0.02)
    assert account.slowdowns()[1] == pytest.approx(4, rel=0.02)


def test_several_iterations_between_two_meetings_take_their_fixed_part_each():
    run = made(constant(), fixed=0.5)
    once = run.meetings
    twice = meetings_of(2 * once.samples.T, 2 * once.own[0].T, comm=0.004)
    assert account_of(twice).gain.speed_up.estimate == pytest.approx(run.gained, rel=0.01)


def test_a_device_that_reports_its_times_an_iteration_late_shows_the_same():
    run = made(constant(), fixed=0.3, noise=0.02, lag=1)
    interval = claimed(run)
    assert interval.low <= run.gained <= interval.high
    assert claimed(made(constant(), fixed=0.3, lag=1)).estimate == pytest.approx(run.gained, rel=0.05)


def test_workers_whose_fixed_parts_differ_are_told_apart():
    # All take 30 ms to begin with, and worker 2 then takes four times as long for each sample.
    sizes = np.array([[80.0] * 3] * 5 + [[110.0, 110.0, 20.0]] * 40)
    account = account_of(meetings_of(sizes, 0.030 + 0.001 * np.array([1, 1, 4]) * sizes))
    assert account.slowdowns()[2] == pytest.approx((30 + 320) / (30 + 80), rel=0.05)
    assert account.gain.speed_up.estimate == pytest.approx(45 * 0.352 / (5 * 0.352 + 40 * 0.142), rel=0.05)


def test_waiting_and_slowness_are_those_of_equal_sizes():
    account = account_of(made(constant(), fixed=0.25, noise=0.02).meetings)
    assert [account.slowdowns()[worker] for worker in range(4)] == pytest.approx([0.5, 0.5, 2.0, 4.0], rel=0.05)
    equal = account_of(made(constant(), fixed=0.25, noise=0.02, balanced=False).meetings)
    assert account.gain.equal_waits == pytest.approx(equal.waiting, abs=0.02)
    assert account.waiting < 0.2 < account.gain.equal_waits


def test_whole_batches_take_as_long_each_so_that_sizes_need_not_change_after_the_first_step():
    account, unknown = (Account(4, BATCH, scheme) for scheme in ("lb-bsp:micro_batch=2", "lb-bsp"))
    run = made(constant(), noise=0.02)
    for each in (account, unknown):
        each.take(run.meetings.part(slice(START, None)))
    gained = account.gain.speed_up
    assert gained.low < gained.estimate < gained.high < 1.05 * gained.low
    assert gained.estimate == pytest.approx(run.gained, rel=0.06)
    assert account.slowdowns()[3] == pytest.approx(4.0, rel=0.05)
    assert unknown.gain.speed_up.high > 1.2 * unknown.gain.speed_up.low


def test_memory_does_not_grow_with_the_run():
    account = Account(2, BATCH)
    noise = np.random.default_rng(0)
    for _ in range(20):
        sizes = noise.choice([60.0, 120.0, 180.0], 2000)
        both = np.stack([sizes, BATCH - sizes], axis=1)
        account.take(meetings_of(both, both * [0.001, 0.002], comm=0.0))
    assert account.iterations == 40_000
    assert 256 <= account.gain._kept.shape[1] <= 512
    assert sum(map(len, account.gain.elasticity._told)) <= 512
    assert account.gain.elasticity.medians.tolist() == [1.0, 1.0]
