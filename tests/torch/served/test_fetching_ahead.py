"""Batches that are fetched before the last one is computed: a worker claims as far ahead as its loop fetches."""

from collections import defaultdict
from itertools import chain

import numpy as np
import pytest
from support import ahead_habits, habits, served_ahead
from support.processes import results
from support.recorded import by_worker
from support.served import run_served, server_events
from support.training import Run

pytestmark = pytest.mark.multiprocess

SAMPLES, EPOCHS = 200, 2


def run_of(scheme, **more):
    return Run(samples=SAMPLES, epochs=EPOCHS, scheme=scheme, **more)


def trained(values, epoch):
    """The positions of an epoch that any worker has trained on, in ascending order."""
    return sorted(chain.from_iterable(chain.from_iterable(value["positions"][epoch] for value in values)))


CASES = [
    ("ssp:bound=1", served_ahead.prefetch, {}),
    ("asp:load=lb-bsp", served_ahead.prefetch_three, {}),
    ("dssp:lower=1,upper=3", served_ahead.fetch_between_forward_and_backward, {}),
    ("ssp:bound=2,servers=2", served_ahead.fetch_between_backward_and_step, {}),
    ("ssp:bound=1", served_ahead.accumulate_windows, {}),
    ("asp:exchange=overlapped", served_ahead.prefetch, {}),
    ("asp:exchange=overlapped", served_ahead.accumulate_windows, {}),
    ("ssp:bound=1,exchange=overlapped", served_ahead.fetch_between_forward_and_backward, {}),
    ("dssp:lower=1,upper=3", served_ahead.prefetch, {"num_workers": 1}),
]


@pytest.mark.parametrize(("scheme", "script", "more"), CASES, ids=lambda part: getattr(part, "__name__", str(part)))
def test_each_sample_is_trained_on_once_and_an_epoch_ends_for_all_together(tmp_path, scheme, script, more):
    run = run_of(scheme, **more)
    servers = 2 if "servers=2" in scheme else 1
    values = results(run_served(script, 3, run, run_dir=tmp_path, servers=servers))
    assert [trained(values, epoch) for epoch in range(EPOCHS)] == [list(range(SAMPLES))] * EPOCHS
    ended = [value["ended"] for value in values]
    assert ended[1:] == ended[:1] * 2
    assert np.isfinite(ended[0]).all()
    assert ended[0][0] != ended[0][1] != ended[0][2]
    pushes = server_events(tmp_path, "push")
    assert sum(event.samples for event in pushes) == EPOCHS * SAMPLES
    if script is served_ahead.accumulate_windows:
        assert [event.units for event in pushes] == [2 * event.samples for event in pushes]
    # Every iteration is recorded once, with the samples of its push.
    events = by_worker(tmp_path)
    for rank in range(3):
        iterations = [event.samples for event in events[rank] if event.kind == "iteration"]
        assert iterations == [event.samples for event in pushes if event.worker == rank]


@pytest.mark.parametrize(
    "script", [served_ahead.accumulate, served_ahead.skip_at_first], ids=lambda script: script.__name__
)
def test_a_plain_loop_costs_one_request_for_each_batch(tmp_path, script):
    run = run_of("ssp:bound=1")
    values = results(run_served(script, 3, run, run_dir=tmp_path))
    ended = [value["ended"] for value in values]
    assert ended[1:] == ended[:1] * 2
    requests = [event for event in server_events(tmp_path) if event.kind in ("push", "more") and event.worker == 0]
    trained_on = sum(len(positions) for positions in values[0]["positions"])
    skipped = 2 * EPOCHS if script is served_ahead.skip_at_first else 0
    assert len(requests) <= trained_on + skipped


def test_claims_ahead_are_asked_for_once_in_an_epoch(tmp_path):
    results(run_served(served_ahead.prefetch_three, 1, run_of("asp"), run_dir=tmp_path))
    begun, asked = 0, defaultdict(list)
    for event in server_events(tmp_path):
        begun += event.kind == "begin"
        if event.kind == "more":
            asked[begun].append(event.ahead)
    # And at the end, to find out that nothing is left.
    assert [asked[epoch][:3] for epoch in (1, 2)] == [[1, 2, 3]] * 2
    assert [len(asked[epoch]) for epoch in (1, 2)] == [4, 4]


ACROSS = (
    ahead_habits.fetch_two_ahead_over_all_epochs,
    ahead_habits.fetch_between_forward_and_backward,
    ahead_habits.weigh_ahead,
)
"""Habits that fetch the first batches of an epoch while they hold the last ones of the epoch before."""


@pytest.mark.parametrize(
    ("habit", "epochs"),
    [
        (ahead_habits.fetch_one_ahead, 2),
        (ahead_habits.fetch_one_ahead_to_a_device, 2),
        (ahead_habits.fetch_with_processes, 2),
        (ahead_habits.accumulate_a_window_fetched_up_front, 2),
        (ahead_habits.skip_batches, 2),
        *((habit, 1) for habit in ACROSS),
    ],
    ids=lambda part: getattr(part, "__name__", str(part)),
)
def test_one_worker_trains_as_without_servers(tmp_path, habit, epochs):
    run, options = Run(samples=75, epochs=epochs, batch_size=15), {"scheme": "ssp:bound=0,rate=raw"}
    (value,) = results(run_served(habits.attempt, 1, habit, run, options, run_dir=tmp_path))
    assert not isinstance(value, str), value
    np.testing.assert_allclose(value, habits.alone(habit, run), rtol=0, atol=1e-12)


def test_a_batch_of_the_epoch_before_is_refused_before_a_push(tmp_path):
    values = results(
        run_served(habits.attempt, 2, ACROSS[0], Run(samples=75, epochs=2), {"scheme": "asp"}, run_dir=tmp_path)
    )
    for value in values:
        assert "step on the batches of an epoch before the next epoch's first batch is fetched" in value
    pushes = server_events(tmp_path, "push")
    assert sum(event.samples for event in pushes) < 75


def test_a_last_batch_that_is_left_is_warned_of_and_a_pass_that_is_looked_at_pushes_nothing(tmp_path):
    values = results(run_served(served_ahead.look_and_leave_the_last, 3, run_of("asp"), run_dir=tmp_path))
    pushes = server_events(tmp_path, "push")
    assert all(event.samples for event in pushes)
    assert sum(event.samples for event in pushes) == sum(len(trained(values, epoch)) for epoch in range(EPOCHS))
    assert SAMPLES - 3 * 5 <= len(trained(values, 0)) <= SAMPLES - 3
    for epoch in range(EPOCHS):
        assert len(set(trained(values, epoch))) == len(trained(values, epoch))
    for value in values:
        (said,) = value["warned"]  # In the second epoch. After it, the script ends.
        assert said.startswith("the last batches of an epoch were fetched ahead and not stepped on")


@pytest.mark.parametrize("early", [True, False], ids=["before the forward pass", "between backward and step"])
def test_a_measured_time_is_that_of_its_batch(tmp_path, early):
    results(run_served(served_ahead.take_long, 1, run_of("asp", batch_size=20), 0.03, early, run_dir=tmp_path))
    (events,) = by_worker(tmp_path)
    times = [event.compute_seconds for event in events if event.kind == "iteration"]
    pushes = server_events(tmp_path, "push")
    assert len(times) == len(pushes)
    epoch = len(times) // EPOCHS
    assert all(times[first + number] >= 0.03 for first in (0, epoch) for number in range(0, epoch, 3))


def test_what_a_worker_holds_when_it_dies_is_trained_on_by_the_others(tmp_path):
    run = Run(samples=900, epochs=EPOCHS, scheme="ssp:bound=1")
    outcomes = run_served(served_ahead.prefetch_and_die, 3, run, 1, run_dir=tmp_path)
    first, second = results([outcomes[0], outcomes[2]])
    assert first["ended"] == second["ended"]
    assert sum(event.samples for event in server_events(tmp_path, "push")) == EPOCHS * 900


@pytest.mark.parametrize("scheme", ["ssp:bound=1", "asp:exchange=overlapped"])
def test_what_a_worker_holds_when_it_is_given_up_is_forfeited(tmp_path, scheme):
    run = Run(samples=900, epochs=EPOCHS, scheme=scheme)
    values = results(run_served(served_ahead.prefetch_and_be_given_up, 3, run, 1, run_dir=tmp_path))
    assert values[0]["ended"] == values[2]["ended"]
    assert np.isfinite(values[1]["ended"]).all()
    assert sum(event.samples for event in server_events(tmp_path, "push")) == EPOCHS * 900


def test_forfeited_gradients_are_dropped(tmp_path):
    run, options = Run(samples=75, epochs=1, batch_size=15), {"scheme": "ssp:bound=0,rate=raw"}
    habit = served_ahead.accumulate_and_be_given_up
    (value,) = results(run_served(habits.attempt, 1, habit, run, options, run_dir=tmp_path))
    assert not isinstance(value, str), value
    np.testing.assert_allclose(value, habits.alone(habit, run), rtol=0, atol=1e-12)
