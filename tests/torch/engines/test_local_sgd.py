"""Local SGD: workers that train alone for some iterations, then average their models by samples."""

import numpy as np
import pytest
import torch
from support import training
from support.processes import results, run_workers
from support.records import check_records
from support.told_speeds import told
from support.training import Run

from evenstep.telemetry import read_events

pytestmark = pytest.mark.multiprocess

# 3 workers x 5 = 15 a slice: 5 whole slices and one of 4, too few for all, so that windows of 4 end in mid-window.
UNEVEN = {"samples": 79, "epochs": 6}


def same(value, expected, tolerance=1e-12):
    np.testing.assert_allclose(value, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_it_is_the_mathematics_of_one_process_with_a_model_per_worker(optimizer):
    run = Run(scripted=5, optimizer=optimizer, parts={"period": 4}, **UNEVEN)
    values = results(run_workers(training.train_locally, 3, run))
    assert any(not positions for value in values for _, _, positions, _ in value["positions"])
    expected = training.train_locally_alone(run, [value["positions"] for value in values], period=4)
    for value in values:
        same(value["weights"], expected)


def test_with_a_period_of_one_it_is_bulk_synchronous_training():
    run = Run(scripted=7, parts={"period": 1}, **UNEVEN)
    for value in results(run_workers(training.train, 3, run)):
        same(value["weights"], training.train_alone(run, 15), tolerance=1e-10)


def test_a_longer_period_is_something_else():
    run = Run(scheme="local-sgd:period=3", **UNEVEN)
    (value, *_) = results(run_workers(training.train, 3, run))
    assert np.abs(np.array(value["weights"]) - training.train_alone(run, 15)).max() > 1e-4


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_after_an_epoch_all_workers_are_alike_with_their_optimizers_state(optimizer):
    run = Run(scripted=3, optimizer=optimizer, parts={"period": 4}, **UNEVEN)
    values = results(run_workers(training.train_locally, 3, run))
    assert any(not positions for value in values for _, _, positions, _ in value["positions"])
    assert all(value["weights"] == values[0]["weights"] for value in values)
    assert all(value["state"] == values[0]["state"] for value in values)


def test_with_a_period_of_one_adam_counts_its_steps_as_one_process_does():
    run = Run(scripted=7, optimizer="adam", parts={"period": 1}, **UNEVEN)
    values = results(run_workers(training.train_locally, 3, run))
    assert any(not positions for value in values for _, _, positions, _ in value["positions"])
    assert [value["steps"] for value in values] == [[6.0 * 6] * 4] * 3


@pytest.mark.parametrize("load", ["bsp", "lb-bsp", "dbs"])
def test_sizes_change_only_where_workers_meet(load, tmp_path):
    scheme = told(f"local-sgd:period=3,load={load}", [1, 1, 3])
    run = Run(scheme=scheme, samples=480, batch_size=8, epochs=2)
    values = results(run_workers(training.record, 3, run, str(tmp_path)))
    sizes = values[0]["sizes"]
    assert [value["sizes"] for value in values] == [sizes] * 3
    changed = {k for k in range(1, len(sizes)) if sizes[k] != sizes[k - 1]}
    # 20 iterations an epoch: averages follow the iterations 2, 5, ... 17, and 19.
    assert all(k % 20 in (0, 3, 6, 9, 12, 15, 18) for k in changed)
    if load != "bsp":
        assert sizes[-1][2] < 5
    meetings = [event for event in read_events(tmp_path) if event.kind == "iteration" and event.worker == 0]
    assert len(meetings) == 2 * 7
    assert {"run", "plan", "iteration"} <= check_records(tmp_path)
    for event in meetings:
        parts = sum(getattr(event, f"{part}_seconds") for part in ("input", "compute", "wait", "comm"))
        assert parts <= event.iteration_seconds + 1e-3


def test_units_weigh_the_averages():
    run = Run(scripted=4, parts={"period": 1}, samples=82, epochs=4)
    for value in results(run_workers(training.train_weighed, 3, run)):
        same(value["weights"], training.train_weighed_alone(run, 15), tolerance=1e-10)


def test_a_users_ddp_model_sums_no_gradients():
    run = Run(scripted=8, parts={"period": 1}, samples=82, epochs=3)
    for value in results(run_workers(training.train_distributed_sampler, 3, run)):
        same(value["weights"], training.train_alone(run, 15), tolerance=1e-10)


def test_a_single_process_is_ordinary_training():
    run = Run(scheme="local-sgd:period=3", samples=82, epochs=3, global_batch_size=20)
    same(training.train(run)["weights"], training.train_alone(run, 20))


def test_a_worker_that_dies_is_named():
    outcomes = run_workers(
        training.train_and_die, 3, Run(scheme="local-sgd:period=2", options={"timeout": 10.0}), 1, 5, "SIGKILL"
    )
    assert outcomes[1].exitcode == -9
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error.startswith("WorkerLostError: worker 1 ")


def test_buffers_are_averaged_too():
    run = Run(scripted=5, parts={"period": 3}, samples=90, epochs=2)
    values = results(run_workers(training.train_batch_norm_locally, 3, run))
    assert all(value == values[0] for value in values)
    assert torch.tensor(values[0]).isfinite().all()


def test_settling_averages_between_two_averages():
    run = Run(scheme="local-sgd:period=4", samples=90)
    values = results(run_workers(training.settle_in_mid_window, 3, run, 2))
    assert values[0]["before"] != values[1]["before"]
    assert values[0]["after"] == values[1]["after"] == values[2]["after"]
    same(values[0]["after"], np.mean([value["before"] for value in values], axis=0))
    assert values[0]["iteration"] == 2
