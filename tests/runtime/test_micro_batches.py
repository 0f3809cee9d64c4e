"""Uneven accumulation: micro-batches of a fixed shape, another number of them on each worker, one step for all."""

import numpy as np
import pytest
from support import training
from support.processes import results, run_workers
from support.training import Run

pytestmark = pytest.mark.multiprocess

HABITS = ["zero first", "zero last", "zero the model", "step where it synchronises"]


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
    slow = {"emulate": training.cluster_of([1, 1, 3])}
    run = Run(scheme="lb-bsp:micro_batch=2", samples=1260, batch_size=14, epochs=1, options=slow)
    values = results(run_workers(training.train_in_micro_batches, 3, run, "zero first"))
    assert values[2]["batches"] < values[0]["batches"] / 1.3
    assert all(value["iterations"] == 30 for value in values)
    assert all(value["largest"] == 2 for value in values)


@pytest.mark.parametrize(
    ("misuse", "says"),
    [
        ("a scheduler that prepare does not know", "schedulers=scheduler"),
        ("a scheduler built afterwards", "schedulers=scheduler"),
        ("weigh_by", "weigh_by does not go with micro_batch"),
        ("a closure", "a closure does not go with micro_batch"),
        ("the optimizer of before", "step the one that prepare returned"),
    ],
)
def test_what_cannot_work_says_so(misuse, says):
    run = Run(scheme="bsp:micro_batch=2", samples=40, batch_size=8)
    for outcome in run_workers(training.misuse_micro_batches, 2, run, misuse):
        assert outcome.error.startswith("ConfigError")
        assert says in outcome.error
