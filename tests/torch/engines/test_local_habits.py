"""Habits of scripts under local SGD and DiLoCo: the same numbers as without the habit, or as in one process."""

from dataclasses import replace

import numpy as np
import pytest
from support import local_habits, training
from support.processes import results, run_workers
from support.training import Run

pytestmark = [pytest.mark.multiprocess, pytest.mark.xdist_group("local_habits")]

SCHEMES = ["local-sgd:period=4", "diloco:period=4", "diloco:period=4,fragments=2,alpha=0.5,delay=1"]
# As in test_local_sgd.py: the last slice of an epoch is too short for all workers.
WINDOWS = Run(scripted=5, parts={"period": 4}, accumulate=2, samples=79, epochs=6)
SKIPPED = Run(scheme="local-sgd:period=4", optimizer="sgd")
# Within a period, at its end and at that of an epoch; and the last ones of an epoch, in one period and in two.
SKIPS = [((number,), looks) for number in (1, 3, 5) for looks in (False, True)]
SKIPS += [((4, 5), False), ((2, 3, 4, 5), False)]
# Worker 2 has no sample in the first period.
FEW = {"samples": 2, "epochs": 5, "parts": {"period": 1}}


@pytest.fixture(scope="module")
def ran():
    """The values of each run by worker, all runs in one start of the workers."""
    calls = {}
    for scheme in SCHEMES:
        run = Run(scheme=scheme)
        calls[f"plain {scheme}"], calls[f"masked {scheme}"] = (training.train, run), (local_habits.masked, run)
        for toggles in (False, True):
            calls[f"adversarial {scheme} {toggles}"] = local_habits.adversarial, run, toggles
        for settles in (False, True):
            calls[f"left {scheme} {settles}"] = local_habits.leave_every_loop, run, 3, settles
        for count in (0, 1):
            calls[f"counts {count} {scheme}"] = local_habits.count_alike, run, count
        calls[f"resumed {scheme}"] = training.train_and_resume, run, 3
        calls[f"rolled back {scheme}"] = local_habits.roll_back, run, 3, 5
    for optimizer in ("momentum", "adam"):
        calls[f"windows {optimizer}"] = training.train_locally, replace(WINDOWS, optimizer=optimizer)
        calls[f"few {optimizer}"] = training.train, Run(scripted=7, optimizer=optimizer, **FEW)
        calls[f"overflow {optimizer}"] = local_habits.overflow, Run(scheme=SCHEMES[0], optimizer=optimizer), 1, 1
    calls["spoilt"] = local_habits.spoil_now_and_then, Run(scheme="local-sgd:period=1", epochs=45), 1
    calls["overflow first"] = local_habits.overflow, Run(scheme="local-sgd:period=1"), 1, 1
    for skips in SKIPS:
        calls[f"skipped {skips}"] = local_habits.skip_batches, SKIPPED, 1, *skips
    calls["late"] = local_habits.go_backward_late, SKIPPED
    for scheme in ("local-sgd:period=2", "diloco:period=2"):
        calls[f"integers {scheme}"] = local_habits.integer_state, Run(scheme=scheme)
    calls["split"] = local_habits.split_optimizer, Run(scheme="local-sgd")
    values = results(run_workers(training.in_turn, 3, calls))
    return {name: [value[name] for value in values] for name in calls}


def same(values, expected, tolerance=1e-12):
    for value in values:
        np.testing.assert_allclose(value, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_model_that_is_frozen_while_another_steps_is_averaged(ran, scheme):
    plain = ran[f"adversarial {scheme} False"]
    same(plain, plain[0])
    same(ran[f"adversarial {scheme} True"], plain[0])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_buffer_that_is_infinite_from_the_start_is_no_divergence(ran, scheme):
    same(ran[f"masked {scheme}"], ran[f"plain {scheme}"][0]["weights"])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_loop_that_was_left_in_a_period_has_ended_it(ran, scheme):
    settled = ran[f"left {scheme} True"]
    same(settled, settled[0])
    same(ran[f"left {scheme} False"], settled[0])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_workers_that_all_count_nothing_have_equal_weights(ran, scheme):
    values = ran[f"counts 0 {scheme}"]
    same(values, values[0])
    if "delay" not in scheme:  # What was sent before would have no weight: the models of the average count.
        same(values, ran[f"counts 1 {scheme}"][0])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_state_that_is_loaded_within_a_period_begins_another(ran, scheme):
    same(ran[f"rolled back {scheme}"], ran[f"resumed {scheme}"][0]["weights"])


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_gradients_that_wait_for_a_step_stay_when_a_copy_comes(ran, optimizer):
    values, run = ran[f"windows {optimizer}"], replace(WINDOWS, optimizer=optimizer)
    assert any(not positions for value in values for _, iteration, positions, _ in value["positions"])
    expected = training.train_locally_alone(run, [value["positions"] for value in values], period=4)
    same([value["weights"] for value in values], expected)


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_a_worker_that_has_not_stepped_yet_gets_the_state_of_the_others(ran, optimizer):
    run = Run(scripted=7, optimizer=optimizer, **FEW)
    values = ran[f"few {optimizer}"]
    assert all(0 in sizes for sizes in values[0]["sizes"])
    same([value["weights"] for value in values], training.train_alone(run, 15), tolerance=1e-10)


def test_an_overflow_on_one_worker_in_the_first_period_is_no_disagreement(ran):
    for values in (ran["overflow first"], ran["overflow momentum"], ran["overflow adam"]):
        assert all(value == values[0] for value in values)
        assert np.isfinite(values[0]["weights"]).all()


def test_weights_that_are_spoilt_now_and_then_do_not_add_up_to_a_hundred_in_a_row(ran):
    values = ran["spoilt"]
    assert values[1]["spoilt"] > 100
    same([value["weights"] for value in values], values[0]["weights"])
    assert np.isfinite(values[0]["weights"]).all()


@pytest.mark.parametrize("skips", SKIPS)
def test_batches_that_were_not_computed_do_not_count_in_the_average(ran, skips):
    values = ran[f"skipped {skips}"]
    positions = [value["positions"] for value in values]
    expected = training.train_locally_alone(SKIPPED, positions, period=4)
    same([value["weights"] for value in values], expected)


def test_a_backward_after_the_average_of_its_period_is_refused(ran):
    assert all("came after the forward pass of the next batch" in each for each in ran["late"])


def test_an_optimizer_that_is_split_over_the_workers_is_refused(ran):
    assert all("steps the whole model on its own, and an optimizer that is split" in each for each in ran["split"])


def test_a_state_in_integers_is_refused_where_it_would_be_averaged(ran):
    assert all("keeps its state 'codes' in integers" in each for each in ran["integers local-sgd:period=2"])
    values = ran["integers diloco:period=2"]
    same(values, values[0])
