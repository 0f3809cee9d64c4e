"""FSDP2: the same mathematics as one process, with parameters, gradients and optimizer state in shards."""

import signal
import statistics

import numpy as np
import pytest
import torch
from support import sharded, training
from support.processes import results, run_workers
from support.training import Run

from evenstep.telemetry import read_events
from evenstep.telemetry.events import IterationDone

pytestmark = pytest.mark.multiprocess

UNEVEN = {"samples": 82, "epochs": 6}


def close(values, expected):
    for value in values:
        np.testing.assert_allclose(value["weights"], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("workers", "optimizer"), [(3, "adam"), (4, "momentum")])
def test_changing_sizes_follow_the_trajectory_of_one_process(workers, optimizer):
    run = Run(scripted=11, optimizer=optimizer, **UNEVEN)
    values = results(run_workers(sharded.train_heard, workers, run))
    assert [value["warnings"] for value in values] == [[]] * workers  # FSDP's own communication is not the script's.
    assert len({tuple(sizes) for sizes in values[0]["sizes"]}) > 10
    assert any(0 in sizes for sizes in values[0]["sizes"]) or workers < 4
    close(values, training.train_alone(run, 5 * workers))
    assert values[0]["keys"] == ["module.0.bias", "module.0.weight", "module.2.bias", "module.2.weight"]


def test_two_replicas_in_two_shards_each():
    run = Run(scripted=11, **UNEVEN)
    close(results(run_workers(sharded.train_replicated, 4, run)), training.train_alone(run, 20))


def test_a_clipped_gradient_is_the_global_one():
    run = Run(scripted=7, **UNEVEN)
    close(results(run_workers(sharded.train_clipped, 2, run)), sharded.train_clipped_alone(run, 10, 0.1))


def test_units_instead_of_samples():
    run = Run(scripted=4, **UNEVEN)
    close(results(run_workers(sharded.train_weighed, 3, run)), training.train_weighed_alone(run, 15))


def test_accumulation_windows_with_slices_that_differ():
    run = Run(scripted=2, accumulate=3, samples=82, epochs=6)
    close(results(run_workers(sharded.train_accumulating, 4, run)), training.train_alone(run, 20))


def test_an_overflow_on_one_worker_skips_the_step_on_all():
    run = Run(scripted=5, samples=82, epochs=1, dtype=torch.float32)
    values = results(run_workers(sharded.overflow, 3, run, 1, 3))
    for value in values:
        (scale, weights), (scale_after, weights_after) = value["before"], value["after"]
        assert scale_after == scale / 2
        assert weights_after == weights
        assert value["end"] == values[0]["end"] != weights
        assert np.isfinite(value["end"]).all()


@pytest.mark.parametrize(
    "train",
    [
        sharded.train_beside_a_busy_worker,
        sharded.average_beside_a_busy_worker,
        sharded.sum_beside_a_busy_worker,
        sharded.gather_beside_a_busy_worker,
    ],
)
def test_waiting_for_a_slower_worker_is_no_compute(train, tmp_path):
    results(run_workers(train, 2, Run(samples=100, dtype=torch.float32), 1, tmp_path))
    seconds = {worker: [] for worker in range(2)}
    for event in read_events(tmp_path, kind=IterationDone):
        seconds[event.worker].append(event.compute_seconds)
    assert len(seconds[0]) == 10
    assert statistics.median(seconds[0]) < statistics.median(seconds[1]) / 3


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_checkpoint_goes_on_in_other_shards(tmp_path, asynchronous):
    run = Run(scripted=3, optimizer="adam", global_batch_size=15, samples=82, epochs=3)
    results(run_workers(sharded.train_saving, 3, run, tmp_path, 8, asynchronous))
    close(results(run_workers(sharded.train_restored, 2, run, tmp_path)), training.train_alone(run, 15))


def test_a_worker_that_dies_is_named():
    outcomes = run_workers(sharded.die, 3, Run(**UNEVEN), 1, 3)
    assert outcomes[1].exitcode == -signal.SIGKILL
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error.startswith("WorkerLostError: worker 1 ended, died, stopped or did not answer")


def test_what_does_not_go_with_shards_is_refused_with_the_reason():
    (said, _) = results(run_workers(sharded.refusals, 2, Run(batch_size=4)))
    assert said == {
        "local-sgd": "under the scheme 'local-sgd:period=2' each worker has the whole model, and fully_shard leaves it"
        " a part: use lb-bsp, dbs, bsp or batch_sizes, or pass the plain model",
        "micro_batch": "a model in fully_shard needs as many forward passes on every worker, and accumulation or"
        " micro_batch gives each its own number: leave them out",
        "comm_hook": "FSDP has no communication hook like DDP's: leave out comm_hook, or fully_shard",
        "part": "parts of the model are sharded by fully_shard and the whole is not: apply it to the model too",
    }
