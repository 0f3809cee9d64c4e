"""What is taken for the time of a worker's iteration, and what for noise."""

import json

import pytest

from evenstep.core.groups import IterationTimes


def times_of(*workers, samples=8):
    times = IterationTimes()
    for worker, each in enumerate(workers):
        for seconds in each:
            times.observe(worker, seconds, samples)
    return times


def test_a_workers_time_is_the_median_of_its_latest_nine():
    times = times_of([99.0] * 20 + [1.0] * 5 + [1.1] * 4, [9.0] * 5)
    assert times.estimate([0, 1], 2) == [1.0, 9.0]


def test_nothing_is_known_before_five_iterations_of_all_who_are_here():
    times = times_of([1.0] * 4, [2.0] * 5)
    assert times.estimate([0, 1], 2) is None
    assert IterationTimes().estimate([], 2) is None


def test_who_is_not_here_has_the_last_known_time_or_the_middle_one():
    assert times_of([1.0] * 5, [3.0] * 5, [2.0] * 5).estimate([0], 4) == [1.0, 3.0, 2.0, 2.0]


def test_another_size_begins_anew():
    times = times_of([1.0] * 5, [4.0] * 5, samples=16)
    for _ in range(5):
        assert times.estimate([0, 1], 2) in (None, [1.0, 4.0])
        times.observe(1, 1.0, 4)
    assert times.estimate([0, 1], 2) == [1.0, 1.0]
    times.observe(0, 1.2, 15)  # Nearly the same says nearly the same.
    assert times.estimate([0, 1], 2) is not None


def test_what_noise_alone_may_do_counts_as_the_middle_however_slow():
    steady, noisy = [1.0] * 9, [0.7, 1.9, 1.4, 0.8, 1.5, 1.6, 0.9, 1.3, 1.7]
    assert times_of(steady, steady, noisy).estimate([0, 1, 2], 3) == [1.0, 1.0, 1.0]
    slow = [4 * each for each in noisy]
    assert times_of(steady, steady, slow).estimate([0, 1, 2], 3) == [1.0, 1.0, 5.6]


def test_times_that_are_none_say_nothing():
    assert times_of([0.0] * 5, [1.0] * 5).estimate([0, 1], 2) is None


@pytest.mark.parametrize("more", [[], [(1, 2.0, 8)] * 3, [(0, 1.0, 4)] * 5])
def test_a_checkpoint_goes_on_as_if_there_had_been_none(more):
    times, again = times_of([1.0] * 12, [3.0, 3.5] * 3), IterationTimes()
    again.load_state_dict(json.loads(json.dumps(times.state_dict())))
    for each in (times, again):
        for event in more:
            each.observe(*event)
    assert again.estimate([0, 1], 2) == times.estimate([0, 1], 2)
