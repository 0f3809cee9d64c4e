"""Local steps on servers: a push is the change of a model over a period, and the servers' optimizer steps along it."""

import shutil
import threading
from itertools import chain

import numpy as np
import pytest
import torch
from support import local_habits, served_faults, served_training, training
from support.processes import CONTEXT, results
from support.recorded import by_worker
from support.served import leaves, run_served, server_events
from support.training import Run
from torch.utils.data import DataLoader, TensorDataset

import evenstep
from evenstep.core.errors import ConfigError
from evenstep.schemes import parse_scheme

pytestmark = pytest.mark.multiprocess

# 3 workers x 5 samples x 4 steps are 60 a global batch; the last claims of an epoch are shorter.
UNEVEN = {"samples": 187, "epochs": 2}


def trained(run, tmp_path, workers, **settings):
    return results(run_served(served_training.train_in_periods, workers, run, run_dir=tmp_path, **settings))


def with_period(scheme, period):
    return f"{scheme}{',' if ':' in scheme else ':'}period={period}"


def same(values, expected):
    np.testing.assert_allclose(values, expected, rtol=0, atol=1e-10)


def each_once(run, values):
    for epoch in range(run.epochs):
        steps = chain.from_iterable(own for value in values for number, own in value["claims"] if number == epoch)
        assert sorted(chain.from_iterable(steps)) == list(range(run.samples))


@pytest.mark.parametrize(
    ("scheme", "servers", "optimizer"),
    [
        ("asp:period=4,outer=delayed,outer_lr=0.3", 1, "momentum"),
        ("ssp:bound=1,period=4,outer_lr=0.9,servers=2", 2, "adam"),
        ("dssp:lower=1,upper=2,period=4,steps=speed,outer=delayed,outer_lr=0.7", 1, "sgd"),
        ("asp:period=4,outer=nesterov,outer_lr=0.3,outer_momentum=0.7,servers=2", 2, "momentum"),
    ],
)
def test_it_is_the_mathematics_of_one_process_with_a_model_per_worker(tmp_path, scheme, servers, optimizer):
    run = Run(scheme=scheme, optimizer=optimizer, **UNEVEN)
    values = trained(run, tmp_path, 3, servers=servers)
    each_once(run, values)
    pushes = [(event.worker, event.pulled) for event in server_events(tmp_path, "push")]
    claims = [value["claims"] for value in values]
    expected = served_training.train_in_periods_alone(run, claims, pushes, parse_scheme(scheme).outer, 60)
    for value in values:
        same(value["ended"][-1], expected)
        if value["claims"]:
            assert bool(value["kept"]) == (optimizer != "sgd")  # Each worker's optimizer stays with it.
    # Batches have the loader's size, and a lead counts periods.
    assert max(len(step) for own in claims for _, steps in own for step in steps) == 5
    assert max(len(steps) for own in claims for _, steps in own) >= 4
    iterations = [event for events in by_worker(tmp_path) for event in events if event.kind == "iteration"]
    assert len(iterations) == len(pushes) == sum(map(len, claims)) < UNEVEN["samples"] * 2 // 5
    if scheme.startswith("ssp"):
        assert max(event.lead for event in iterations if event.lead is not None) <= 1


def test_with_a_period_and_an_outer_rate_of_one_it_is_asp(tmp_path):
    # Of whole batches: under `asp` a short one counts for its part of a global batch.
    run = Run(scheme="asp:period=1", optimizer="sgd", samples=85, epochs=2)
    values = trained(run, tmp_path, 1)
    same(values[0]["ended"][-1], training.train_alone(run, 5))


def test_batches_may_be_fetched_ahead_within_and_beyond_a_period(tmp_path):
    run = Run(scheme="asp:period=3,outer=nesterov,outer_lr=0.4", optimizer="sgd", num_workers=1, **UNEVEN)
    values = results(run_served(served_training.train_in_periods_ahead, 2, run, run_dir=tmp_path))
    assert values[0]["ended"] == values[1]["ended"]
    assert np.isfinite(values[0]["ended"]).all()
    assert sum(event.samples for event in server_events(tmp_path, "push")) == run.samples * run.epochs


@pytest.mark.parametrize("scheme", ["asp", "grouped:groups=1"])
def test_steps_of_a_period_that_is_left_or_not_finite_are_lost_and_nobody_else_sees_them(tmp_path, scheme):
    run = Run(scheme=with_period(scheme, 3), **UNEVEN)
    function, barrier = served_training.break_and_spoil_a_period, CONTEXT.Barrier(2)
    values = results(run_served(function, 2, run, barrier, run_dir=tmp_path))
    assert [value["skipped"] for value in values] == [0, 1]
    assert any("left out its change of iteration" in each for each in values[1]["warned"])
    assert values[0]["ended"] == [values[0]["ended"][0], values[1]["ended"][1]]
    assert np.isfinite(values[0]["ended"]).all()
    pushed = [event.samples for event in server_events(tmp_path, "push")]
    assert pushed.count(0) == 1  # The samples that the worker left in the first epoch, others have taken.
    assert sum(pushed) == run.samples * run.epochs - 15


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"batch_sampler": [[*range(8)], [*range(8, 12)]]}, "the period counts batches of one worker"),
        ({"batch_size": 4}, "are on the loader's own batches: leave out global_batch_size"),
    ],
)
def test_a_period_needs_batches_of_one_worker(given, says):
    size = 8 if "batch_size" in given else None
    model, loader = torch.nn.Linear(2, 1), DataLoader(TensorDataset(torch.ones(32, 2)), **given)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ConfigError, match=says):
        next(iter(evenstep.prepare(model, optimizer, loader, scheme="asp:period=4", global_batch_size=size)[2]))


def test_a_refused_run_ends_the_servers_that_it_started():
    model, loader = torch.nn.Linear(2, 1), DataLoader(TensorDataset(torch.ones(32, 2)), batch_size=4)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ConfigError, match="averages models"):
        next(iter(evenstep.prepare(model, optimizer, loader, scheme="asp:period=4", cost=[1.0] * 32)[2]))
    assert "evenstep-servers" not in {each.name for each in threading.enumerate()}


def test_a_loss_that_is_only_looked_at_leaves_out_its_batch_at_the_end_of_a_period_too(tmp_path):
    run = Run(scheme="asp:period=3", samples=60, epochs=2)
    skipped, looked, late = (
        results(run_served(function, 1, run, *given, run_dir=tmp_path / str(given)))[0]
        for function, *given in (
            (local_habits.skip_batches, 0, (5,), False),
            (local_habits.skip_batches, 0, (5,), True),
            (local_habits.go_backward_late,),
        )
    )
    assert looked == skipped
    assert "came after the forward pass of the next batch" in late


@pytest.mark.parametrize("late", ["unfreezes", "adds a group"])
def test_parameters_that_servers_do_not_have_are_refused_before_a_push(tmp_path, late):
    run = Run(scheme="asp:period=2", optimizer="sgd")
    told = results(run_served(served_training.train_more_later, 2, run, late, run_dir=tmp_path))
    assert all("the optimizer steps on 2 parameters that required no gradient at prepare" in each for each in told)


@pytest.mark.parametrize("scheme", ["ssp:bound=1", "grouped:groups=1-2/0,across=ssp:bound=1"])
def test_a_worker_killed_in_a_period_holds_nobody_and_no_sample_is_lost(tmp_path, scheme):
    run = Run(scheme=with_period(scheme, 3), **UNEVEN)
    faults = {(2, "step"): served_faults.Kill()}
    outcomes = run_served(served_faults.train, 3, run, tmp_path, 1, faults, run_dir=tmp_path)
    assert outcomes[1].exitcode == -9
    assert leaves(tmp_path)[1] == ["has ended"]
    survivors = results([outcomes[0], outcomes[2]])
    assert survivors[0]["ended"] == survivors[1]["ended"]
    assert served_faults.pushed(tmp_path) == {epoch: list(range(run.samples)) for epoch in range(run.epochs)}


@pytest.mark.parametrize(
    ("scheme", "outer"),
    [
        *(("asp", "delayed,outer_momentum=0.8"), ("asp", "delayed,wire=int8"), ("asp", "nesterov")),
        ("grouped:groups=1", "delayed,outer_momentum=0.8"),
    ],
)
def test_a_run_goes_on_from_a_snapshot_with_the_momentum_of_the_servers(tmp_path, scheme, outer):
    scheme = f"{with_period(scheme, 2)},outer_lr=0.7,outer={outer}"
    run = Run(scheme=scheme, optimizer="sgd", samples=60, epochs=3)
    (whole,) = trained(run, tmp_path, 1)
    pushes = [(event.worker, event.pulled) for event in server_events(tmp_path, "push")]
    begun = {(0, event.epoch): event.version for event in server_events(tmp_path, "begin")}
    snapshots = sorted((tmp_path / "snapshots").iterdir())
    shutil.rmtree(snapshots[-1])
    resumed = run_served(served_faults.train_to_the_end, 1, run, run_dir=tmp_path, resume=True)
    (restored,) = server_events(tmp_path, "restored")
    assert restored.version == 12
    (ended,), served = results(resumed), parse_scheme(run.scheme)
    if served.served.wire == "float32":
        assert ended == whole["ended"][-1]
        return
    # What rounding has left out of earlier pushes stays with the worker that has ended.
    for resumed_at, values in ((None, whole["ended"][-1]), (2, ended)):
        same(
            served_training.train_in_periods_alone(
                run, [whole["claims"]], pushes, served.outer, 10, served.served.wire, begun, resumed_at
            ),
            values,
        )
    assert ended != whole["ended"][-1]


def test_loops_left_at_the_end_of_a_period_evaluation_and_schedules_are_as_in_one_process(tmp_path):
    function = served_training.leave_evaluate_and_schedule
    (value,) = results(run_served(function, 1, "asp:period=4", run_dir=tmp_path))
    plain, batches = function()
    same(value[0], plain)
    assert value[1] == batches


def test_a_stream_is_refused_as_what_it_is(tmp_path):
    (told,) = results(run_served(served_training.train_on_a_stream, 1, "asp:period=4", run_dir=tmp_path))
    assert told.startswith("an IterableDataset keeps samples with their workers")


def test_weights_changed_without_a_step_are_replaced_with_a_warning(tmp_path):
    (warned,) = results(run_served(served_training.step_by_hand, 1, "asp:period=4", run_dir=tmp_path))
    assert sum("the model's weights were changed between steps" in each for each in warned) == 1
