"""Promise 1: the sizes change the clock, never the mathematics."""

import numpy as np
import pytest
from support import training
from support.processes import results, run_workers
from support.training import Run

pytestmark = pytest.mark.multiprocess

# 4 workers x 5 = 20 a slice: 4 whole slices, and a last one of 2 that leaves two workers with nothing.
UNEVEN = {"samples": 82, "epochs": 20}


def close(outcomes, expected):
    for value in results(outcomes):
        np.testing.assert_allclose(value["weights"], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_changing_sizes_follow_the_trajectory_of_one_process(optimizer):
    run = Run(scripted=11, optimizer=optimizer, **UNEVEN)
    outcomes = run_workers(training.train, 4, run)
    values = results(outcomes)
    assert values[0]["iterations"] == 100
    assert [value["sizes"] for value in values[1:]] == [values[0]["sizes"]] * 3
    assert len({tuple(sizes) for sizes in values[0]["sizes"]}) > 50
    assert any(0 in sizes for sizes in values[0]["sizes"])
    close(outcomes, training.train_alone(run, 20))


def test_a_single_process_is_the_same_mathematics():
    run = Run(samples=82, epochs=5, global_batch_size=20)
    np.testing.assert_allclose(training.train(run)["weights"], training.train_alone(run, 20), rtol=0, atol=1e-12)


def test_worker_processes_change_nothing():
    run = Run(scripted=5, num_workers=2, samples=82, epochs=3)
    outcomes = run_workers(training.train, 3, run)
    close(outcomes, training.train_alone(run, 15))


def test_equal_sizes_are_bit_identical_to_plain_ddp():
    import torch

    run = Run(scheme="bsp", samples=120, epochs=4, dtype=torch.float32, batch_size=10)
    ours = results(run_workers(training.train, 3, run))
    plain = results(run_workers(training.train_plain_ddp, 3, run))
    assert ours[0]["weights"] == plain[0]["weights"]
    assert all(value["weights"] == ours[0]["weights"] for value in ours)


def test_accumulation_windows_with_slices_that_differ():
    # Windows of 3 over epochs of 5 slices: the short slice falls on every place of a window, idle workers included.
    run = Run(scripted=2, accumulate=3, samples=82, epochs=6)
    close(run_workers(training.train_accumulating, 4, run), training.train_alone(run, 20))


def test_units_instead_of_samples():
    run = Run(scripted=4, samples=82, epochs=4)
    close(run_workers(training.train_weighed, 4, run), training.train_weighed_alone(run, 20))


def test_two_models_with_a_backward_each():
    run = Run(scripted=9, samples=82, epochs=3)
    close(run_workers(training.train_two_models, 3, run), training.train_two_alone(run, 15))


def test_a_hook_of_the_users_own():
    run = Run(scripted=6, samples=82, epochs=3)
    outcomes = run_workers(training.train_with_hook, 3, run)
    assert results(outcomes)[0]["calls"] >= 18
    close(outcomes, training.train_alone(run, 15))


def test_a_ddp_users_script_with_a_distributed_sampler():
    run = Run(scripted=8, samples=82, epochs=3)
    close(run_workers(training.train_distributed_sampler, 3, run), training.train_alone(run, 15))


def test_an_idle_workers_nan_does_not_spread():
    run = Run(scripted=11, samples=82, epochs=2)
    values = results(run_workers(training.nothing_for_nan, 4, run))
    assert sum(value["idle"] for value in values) > 0
    assert all(value["finite"] for value in values)


@pytest.mark.parametrize("stop_after", [3, 5, 8])
def test_resuming_in_mid_epoch_changes_nothing(stop_after):
    run = Run(scripted=3, samples=82, epochs=3)
    outcomes = run_workers(training.train_and_resume, 3, run, stop_after)
    close(outcomes, training.train_alone(run, 15))
    assert results(outcomes)[0]["keys"] == ["module.0.bias", "module.0.weight", "module.2.bias", "module.2.weight"]


def test_a_blocking_exchange_is_the_same_mathematics():
    run = Run(scripted=11, parts={"exchange": "blocking"}, samples=82, epochs=5)
    close(run_workers(training.train, 4, run), training.train_alone(run, 20))


def test_an_unweighted_mean_is_that_of_the_workers_gradients():
    run = Run(scripted=11, parts={"weighting": "mean"}, samples=82, epochs=5)
    outcomes = run_workers(training.train_locally, 4, run)
    positions = [value["positions"] for value in results(outcomes)]
    expected = training.train_unweighted_alone(run, positions)
    close(outcomes, expected)
    assert np.abs(np.array(expected) - training.train_alone(run, 20)).max() > 1e-4
