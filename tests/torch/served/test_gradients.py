"""What is pushed: gradients that are not finite, clipped, of several batches, of none; and loops that are left."""

import numpy as np
import pytest
import torch
from support import served_scripts, served_training
from support.processes import results
from support.served import run_served
from support.training import Run

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize(("scheme", "servers"), [("asp", 1), ("ssp:servers=2,nonfinite=skip", 2)])
def test_pushes_that_are_not_finite_are_left_out_counted_and_warned_of_once(tmp_path, scheme, servers):
    run = Run(scheme=scheme, samples=77, epochs=2)
    values = results(run_served(served_scripts.train_with_nans, 3, run, 1, [1, 3], run_dir=tmp_path, servers=servers))
    for value in values:
        assert np.isfinite(value["weights"]).all()
        assert value["weights"] == values[0]["weights"]
    assert [len(value["warned"]) for value in values] == [0, 1, 0]
    assert [value["skipped"] for value in values] == [0, 2, 0]


def test_pushes_that_are_not_finite_can_be_refused(tmp_path):
    run = Run(scheme="asp:nonfinite=refuse", samples=77, epochs=2)
    outcomes = run_served(served_scripts.train_with_nans, 1, run, 0, [2], run_dir=tmp_path)
    assert outcomes[0].error.startswith("NonfiniteGradientError")
    assert "iteration 1 on worker 0" in outcomes[0].error


def test_training_that_diverges_ends_with_an_error_and_leaves_the_snapshots_from_before(tmp_path):
    run = Run(scheme="asp", samples=77, epochs=100)
    outcomes = run_served(served_scripts.train_apart, 2, run, run_dir=tmp_path)
    assert any(outcome.error.startswith("DivergedError: training has diverged") for outcome in outcomes)
    assert all(outcome.error for outcome in outcomes)
    for shard in (tmp_path / "snapshots").rglob("*.pt"):
        state = torch.load(shard, weights_only=True)
        assert state["shard"]["weights"].view(torch.float64).isfinite().all()


@pytest.mark.parametrize(
    ("scheme", "workers", "servers"),
    [("bsp:engine=server,clip=2", 3, 1), ("bsp:engine=server,clip=2", 1, 1), ("asp:clip=2,servers=2", 1, 2)],
)
def test_the_norm_is_clipped_over_all_workers_and_servers(tmp_path, scheme, workers, servers):
    # Whole slices alone, so that each push of a single worker is a whole global batch too.
    run = Run(scheme=scheme, samples=75, epochs=2, batch_size=15 // workers)
    values = results(run_served(served_training.train, workers, run, run_dir=tmp_path, servers=servers))
    expected, clipped = served_scripts.train_clipped_alone(run, 2.0, 15)
    assert 0 < clipped < 10
    for value in values:
        np.testing.assert_allclose(value["ended"], expected, rtol=0, atol=1e-10)


def test_who_clips_a_part_of_the_gradient_is_warned(tmp_path):
    values = results(run_served(served_scripts.train_clipping, 2, Run(scheme="asp", samples=77), run_dir=tmp_path))
    for warned in values:
        assert len(warned) == 1
        assert "clip=" in warned[0]


@pytest.mark.parametrize(("workers", "accumulate", "skips"), [(1, 2, ()), (3, 1, (2, 5)), (1, 3, (6,))])
def test_steps_that_are_left_out_and_gradients_that_add_up(tmp_path, workers, accumulate, skips):
    # 5 iterations an epoch, so that windows run across epochs.
    run = Run(scheme="bsp:engine=server", samples=75, epochs=3, batch_size=15 // workers, accumulate=accumulate)
    values = results(run_served(served_scripts.train_by_habit, workers, run, skips, run_dir=tmp_path))
    expected = served_scripts.train_by_habit_alone(run, 15, skips)
    for value in values:
        np.testing.assert_allclose(value["ended"], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("scheme", ["bsp:engine=server", "asp", "ssp:bound=1,exchange=overlapped"])
def test_a_worker_that_leaves_its_loop_holds_nobody_and_takes_part_in_the_next(tmp_path, scheme):
    run = Run(scheme=scheme, samples=77)
    values = results(run_served(served_scripts.break_then_train, 3, run, 1, run_dir=tmp_path))
    for epoch in range(3):
        positions = [position for value in values for part in value["positions"][epoch] for position in part]
        assert sorted(positions) == list(range(77))
    assert len(values[1]["positions"][0]) == 1
    assert all(value["weights"] == values[0]["weights"] for value in values)
