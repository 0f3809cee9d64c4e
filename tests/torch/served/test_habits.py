"""Habits of real scripts on parameter servers: behind a barrier they are one process, elsewhere they do no harm."""

import numpy as np
import pytest
from support import ahead_habits, habits, served_scripts
from support.processes import results
from support.served import run_served
from support.training import Run

pytestmark = pytest.mark.multiprocess

# 3 workers x 5 = 15 a slice: 5 whole slices, and a last one of 2 for which one worker is not asked. Where scripts count
# their batches, all slices are whole.
COUNTED = (
    habits.accumulate_and_weigh_alike,
    habits.accumulate_in_no_sync,
    habits.overflow_everywhere,
    habits.scale_and_accumulate,
    habits.train_in_eval_mode,
)


@pytest.mark.parametrize(
    "habit",
    [
        *COUNTED,
        habits.add_up_losses,
        habits.checkpoint_activations,
        habits.count_after_the_forward_pass,
        habits.freeze_a_layer,
        habits.penalise_gradients,
        habits.step_with_a_closure,
    ],
    ids=lambda habit: habit.__name__,
)
def test_a_habit_behind_a_barrier_is_the_mathematics_of_one_process(tmp_path, habit):
    run = Run(samples=75 if habit in COUNTED else 77, epochs=2)
    options = {"scheme": "bsp:engine=server"}
    expected = habits.alone(habit, run)
    for value in results(run_served(habits.attempt, 3, habit, run, options, run_dir=tmp_path)):
        assert not isinstance(value, str), value
        np.testing.assert_allclose(value, expected, rtol=0, atol=1e-10)


def test_workers_that_share_each_slice_cannot_fetch_ahead_and_are_told_before_a_push(tmp_path):
    run, options = Run(samples=75, epochs=1), {"scheme": "bsp:engine=server"}
    for habit in (ahead_habits.fetch_one_ahead, ahead_habits.fetch_between_forward_and_backward):
        said = results(run_served(habits.attempt, 3, habit, run, options, run_dir=tmp_path / habit.__name__))
        assert all("fetch each batch after the step on the one before, or leave out engine=server" in e for e in said)


def test_behind_a_barrier_several_batches_in_a_row_may_be_skipped(tmp_path):
    run, options = Run(samples=75, epochs=2), {"scheme": "bsp:engine=server"}
    expected = habits.alone(ahead_habits.skip_batches, run)
    for value in results(run_served(habits.attempt, 3, ahead_habits.skip_batches, run, options, run_dir=tmp_path)):
        assert not isinstance(value, str), value
        np.testing.assert_allclose(value, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("optimizer", ["momentum", "fused"])
def test_a_loss_scale_that_overflows_on_one_worker_skips_its_push_alone_and_warns_of_nothing(tmp_path, optimizer):
    run = Run(samples=75, epochs=2, scheme="ssp:bound=1", optimizer=optimizer)
    values = results(run_served(served_scripts.train_with_a_loss_scale, 3, run, 1, (1, 3), run_dir=tmp_path))
    assert [value["warned"] for value in values] == [[], [], []]
    assert [value["scale"] for value in values] == [1000.0, 250.0, 1000.0]
    assert np.isfinite(values[0]["weights"]).all()
    assert values[0]["weights"] == values[1]["weights"] == values[2]["weights"]


def test_who_clips_what_was_unscaled_is_warned(tmp_path):
    run = Run(scheme="asp", samples=30, epochs=1)
    (value,) = results(run_served(served_scripts.train_with_a_loss_scale, 1, run, 0, (), 2.0, run_dir=tmp_path))
    assert len(value["warned"]) == 1
    assert "clip=" in value["warned"][0]


@pytest.mark.parametrize(
    ("habit", "sentence"),
    [
        (habits.two_optimizers_one_model, "one model and one optimizer"),
        (habits.adversaries, "one model and one optimizer"),
    ],
    ids=lambda part: getattr(part, "__name__", ""),
)
def test_what_cannot_be_served_is_refused(tmp_path, habit, sentence):
    run = Run(samples=75, epochs=2)
    for said in results(run_served(habits.attempt, 2, habit, run, {"scheme": "asp"}, run_dir=tmp_path)):
        assert said.startswith("ConfigError: ")
        assert sentence in said


def test_a_mean_over_workers_is_each_ones_own_with_a_warning(tmp_path):
    values = results(run_served(served_scripts.measure, 2, Run(scheme="asp"), run_dir=tmp_path))
    assert [value["mean"] for value in values] == [0.0, 1.0]
    for value in values:
        assert len(value["warned"]) == 1
        assert "do not wait for each other" in value["warned"][0]
