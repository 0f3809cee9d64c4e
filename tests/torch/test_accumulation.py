"""Unequal accumulation: batches of the loader's own size, another number of them on each worker, one step for all."""

import numpy as np
import pytest
import torch
from support import training
from support.processes import results, run_workers
from support.told_speeds import told
from support.training import Run

import evenstep

pytestmark = pytest.mark.multiprocess

HABITS = ["steps in every pass", "steps where it synchronises", "no_sync everywhere"]


@pytest.mark.parametrize("habit", [*HABITS, "tokens", "tokens where it synchronises"])
@pytest.mark.parametrize("batch_size", [2, 3])
def test_a_loss_divided_by_the_number_of_batches_is_the_mean_over_the_union(habit, batch_size):
    # Windows of 3 workers x 4 batches; the last of the epoch has fewer, and a batch that is not whole.
    run = Run(scripted=11, samples=82, batch_size=batch_size, epochs=3)
    alone = training.train_weighed_alone if habit.startswith("tokens") else training.train_alone
    expected = alone(run, 12 * batch_size)
    values = results(run_workers(training.accumulate, 3, run, habit, 4))
    for value in values:
        np.testing.assert_allclose(value["weights"], expected, rtol=0, atol=1e-10)
    assert len({len(value["batches"]) for value in values}) > 1


@pytest.mark.parametrize("habit", [*HABITS, "tokens"])
def test_so_does_a_single_process(habit):
    run = Run(samples=82, batch_size=3, epochs=3)
    alone = training.train_weighed_alone if habit == "tokens" else training.train_alone
    value = training.accumulate(run, habit, 4)
    np.testing.assert_allclose(value["weights"], alone(run, 12), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("scheme", "options"), [("bsp", {"accumulation": 4}), ("bsp:micro_batch=2", {})])
def test_gradients_that_a_script_clips_in_every_pass_are_refused(scheme, options):
    model, optimizer, loader = training.prepared(Run(scheme=scheme, samples=40, batch_size=4, options=options))
    batches = iter(loader)
    inputs, targets = next(batches)
    torch.nn.functional.mse_loss(model(inputs), targets).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)
    optimizer.step()
    with pytest.raises(evenstep.ConfigError, match=r"clip after the last backward of a step, under `if loader\.sync"):
        next(batches)


@pytest.mark.parametrize("scheme", ["bsp", "lb-bsp", "dbs"])
def test_schemes_with_a_barrier_accumulate(scheme):
    run = Run(scheme=scheme, samples=82, batch_size=2, epochs=2)
    for value in results(run_workers(training.accumulate, 2, run, "steps in every pass", 5)):
        np.testing.assert_allclose(value["weights"], training.train_alone(run, 20), rtol=0, atol=1e-10)


def test_given_sizes_are_those_of_a_step():
    # One worker is in its last batch before its first forward pass, in which DistributedDataParallel communicates once.
    run = Run(samples=80, batch_size=2, epochs=1, options={"batch_sizes": [18, 2]})
    values = results(run_workers(training.accumulate, 2, run, "tokens before the model", 5))
    assert [len(value["batches"]) for value in values] == [36, 4]
    for value in values:
        np.testing.assert_allclose(value["weights"], training.train_weighed_alone(run, 20), rtol=0, atol=1e-10)


def test_numbers_of_batches_follow_speeds():
    run = Run(scheme=told("lb-bsp", [4, 4, 1]), samples=480, batch_size=2, epochs=1)
    values = results(run_workers(training.accumulate, 3, run, "steps where it synchronises", 8))
    counts = [np.bincount([iteration for iteration, _ in value["batches"]]) for value in values]
    assert [count[0] for count in counts] == [8, 8, 8]
    assert [count[-1] for count in counts] == [4, 4, 16]
    assert {size for value in values for _, size in value["batches"]} == {2}


def test_a_scaler_steps_where_the_loader_synchronises():
    run = Run(scripted=11, samples=82, batch_size=2, epochs=2)
    for value in results(run_workers(training.scale_in_windows, 3, run, 4)):
        np.testing.assert_allclose(value["weights"], training.train_alone(run, 24), rtol=0, atol=1e-10)


def test_a_step_that_a_scaler_skips_leaves_no_gradient_to_the_next():
    run = Run(scheme="bsp", samples=80, batch_size=2, epochs=2)
    value = training.scale_in_windows(run, 4, overflows=2)
    assert value["steps"] == [step for step in range(1, 21) if step != 2]
    assert np.isfinite(value["weights"]).all()


@pytest.mark.parametrize(
    ("habit", "says"),
    [
        ("counts by itself", "step under `if loader.synchronises:`"),
        ("tokens of a few", "call it for each batch"),
        ("averages in every pass", "average over workers where loader.synchronises"),
        ("sums in every pass", "average over workers where loader.synchronises"),
    ],
)
def test_what_cannot_work_says_so(habit, says):
    run = Run(scheme="bsp", samples=80, batch_size=2)
    for outcome in run_workers(training.accumulate, 2, run, habit, 4):
        assert outcome.error.startswith("ConfigError")
        assert says in outcome.error


@pytest.mark.parametrize("scheme", ["local-sgd", "lb-bsp:micro_batch=2"])
def test_other_schemes_are_refused(scheme):
    for outcome in run_workers(training.accumulate, 2, Run(scheme=scheme), "steps in every pass", 4):
        assert "accumulation needs a scheme that sums gradients once a step" in outcome.error
