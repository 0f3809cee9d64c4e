"""Uneven accumulation: micro-batches of a fixed shape, another number of them on each worker, one step for all."""

import numpy as np
import pytest
import torch
from support import training
from support.processes import results, run_workers
from support.told_speeds import told
from support.training import Run

import evenstep
from evenstep import ConfigError

pytestmark = pytest.mark.multiprocess

COSTS = np.random.default_rng(1).lognormal(0, 1, 82)
HABITS = ["zero first", "zero last", "zero the model", "step where it synchronises", "a closure"]


@pytest.mark.parametrize("habit", HABITS)
def test_it_is_the_mathematics_of_one_process(habit):
    # 3 x 8 = 24 a slice: 3 whole slices, and one of 10; sizes that micro-batches of 3 do not divide among them.
    run = Run(scripted=11, parts={"micro_batch": 3}, samples=82, batch_size=8, epochs=5)
    expected = training.train_scheduled_alone(run, 24)
    values = results(run_workers(training.train_in_micro_batches, 3, run, habit))
    for value in values:
        np.testing.assert_allclose(value["weights"], expected["weights"], rtol=0, atol=1e-10)
        assert value["iterations"] == 20
        assert value["rate"] == expected["rate"]
        assert value["largest"] == 3
    assert len({value["batches"] for value in values}) > 1


@pytest.mark.parametrize("cost", [COSTS, pytest.param(evenstep.Padded(COSTS), id="padded")], ids=lambda cost: "costs")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_cut_by_cost_it_is_the_mathematics_of_one_process(cost, num_workers):
    run = Run(
        scheme="lb-bsp:micro_batch=5",  # It does not divide the global batch.
        samples=82,
        batch_size=8,
        epochs=2,
        num_workers=num_workers,
        options={"cost": cost},
    )
    expected = training.train_scheduled_alone(run, 24)
    values = results(run_workers(training.train_in_micro_batches, 3, run, "zero first"))
    for value in values:
        np.testing.assert_allclose(value["weights"], expected["weights"], rtol=0, atol=1e-10)
        assert value["iterations"] == 8
        # No micro-batch costs more than 5 average samples, but for a sample that does.
        assert value["costliest"] <= max(5.0, COSTS.max() / COSTS.mean()) + 1e-6


def test_worker_processes_change_nothing():
    run = Run(scripted=5, parts={"micro_batch": 4}, num_workers=2, samples=82, batch_size=8, epochs=2)
    expected = training.train_scheduled_alone(run, 24)
    for value in results(run_workers(training.train_in_micro_batches, 3, run, "zero first")):
        np.testing.assert_allclose(value["weights"], expected["weights"], rtol=0, atol=1e-10)


@pytest.mark.parametrize("habit", HABITS)
def test_so_does_a_single_process(habit):
    run = Run(scheme="lb-bsp:micro_batch=5", samples=82, batch_size=20, epochs=3)
    expected = training.train_scheduled_alone(run, 20)
    value = training.train_in_micro_batches(run, habit)
    np.testing.assert_allclose(value["weights"], expected["weights"], rtol=0, atol=1e-12)
    assert value["batches"] == 3 * 17


def test_slow_workers_get_fewer_micro_batches():
    run = Run(scheme=told("lb-bsp:micro_batch=2", [1, 1, 3]), samples=1260, batch_size=14, epochs=1)
    values = results(run_workers(training.train_in_micro_batches, 3, run, "zero first"))
    assert values[2]["batches"] < values[0]["batches"] / 1.3
    assert all(value["moved"] == 1 for value in values)
    assert all(value["iterations"] == 30 for value in values)
    assert all(value["largest"] == 2 for value in values)


@pytest.mark.parametrize(
    ("misuse", "says"),
    [
        ("a scheduler that prepare does not know", "schedulers=scheduler"),
        ("a scheduler built afterwards", "schedulers=scheduler"),
        ("the optimizer of before", "step the one that prepare returned"),
        ("two backwards", "add the losses up and run one backward"),
    ],
)
def test_what_cannot_work_says_so(misuse, says):
    run = Run(scheme="bsp:micro_batch=2", samples=40, batch_size=8)
    for outcome in run_workers(training.misuse_micro_batches, 2, run, misuse):
        assert outcome.error.startswith("ConfigError")
        assert says in outcome.error


def test_copies_of_a_sample_are_fetched_once():
    # The last slice has 2 samples for 3 workers of at least 8: whoever has none computes on copies, in four pieces.
    run = Run(scheme="bsp:micro_batch=2", num_workers=1, samples=50, batch_size=8, epochs=2)
    expected = training.train_scheduled_alone(run, 24)
    for value in results(run_workers(training.train_in_micro_batches, 3, run, "zero first")):
        np.testing.assert_allclose(value["weights"], expected["weights"], rtol=0, atol=1e-10)


def test_a_skipped_step_leaves_nothing_behind():
    run = Run(scripted=7, parts={"micro_batch": 3}, samples=82, batch_size=8, epochs=2)
    expected = training.skip_a_step_alone(run, 24, iteration=3)
    for value in results(run_workers(training.skip_a_step, 3, run, 3)):
        np.testing.assert_allclose(value["weights"], expected, rtol=0, atol=1e-10)


def test_the_state_of_a_scheduler_can_be_saved():
    run = Run(scheme="bsp:micro_batch=2", samples=40, batch_size=8)
    assert training.save_scheduler(run) == {"epoch": 5, "iterations": 5}


def test_a_loop_left_between_two_micro_batches_says_so():
    run = Run(scheme="bsp:micro_batch=2", samples=40, batch_size=8)
    with pytest.raises(ConfigError, match=r"leave it where loader\.synchronises is True"):
        training.leave_between_micro_batches(run)


def test_several_models_are_refused():
    run = Run(scheme="bsp:micro_batch=2", samples=40, batch_size=8)
    with pytest.raises(ConfigError, match="one model and one optimizer"):
        training.train_two_models(run)


def test_sync_batch_norm_is_refused():
    model = torch.nn.Sequential(torch.nn.SyncBatchNorm(1, device="meta"))
    run = Run(scheme="bsp:micro_batch=2", samples=40, batch_size=8)
    with pytest.raises(ConfigError, match="SyncBatchNorm needs as many forward passes"):
        training.prepared(run, model=model)
