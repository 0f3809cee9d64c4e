"""DiLoCo: workers that train alone, and an outer optimizer that steps along the mean change of their models."""

from collections import Counter

import numpy as np
import pytest
import torch
from support import training
from support.processes import results, run_workers
from support.told_speeds import told
from support.training import Run
from torch.utils.data import DataLoader, TensorDataset

import evenstep
from evenstep.core.errors import ConfigError
from evenstep.schemes import Outer, Scheme, bsp, parse_scheme
from evenstep.schemes.scheme import WIRE_BLOCK
from evenstep.tensors.narrow import pack, unpack

pytestmark = pytest.mark.multiprocess

# 3 workers x 5 = 15 a slice: 5 whole slices and one of 4, too few for all, so that windows of 4 end in mid-window.
BY_SPEED = "diloco:period=4,steps=speed"
UNEVEN = {"samples": 79, "epochs": 4}


def same(value, expected, tolerance=1e-12):
    np.testing.assert_allclose(value, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("optimizer", "outer"),
    [
        ("momentum", Outer()),
        ("adam", Outer(rate=0.5, momentum=0.8, nesterov=False)),
        ("adam", Outer(rate=0.9, momentum=0.0, nesterov=False)),
    ],
)
def test_it_is_the_mathematics_of_one_process_with_a_model_per_worker(optimizer, outer):
    run = Run(scripted=5, optimizer=optimizer, parts={"period": 4, "outer": outer}, **UNEVEN)
    values = results(run_workers(training.train_locally, 3, run))
    assert any(not positions for value in values for _, _, positions, _ in value["positions"])
    options = {"lr": outer.rate, "momentum": outer.momentum, "nesterov": outer.nesterov}
    positions = [value["positions"] for value in values]
    expected = training.train_locally_alone(run, positions, period=4, outer=options)
    for value in values:
        same(value["weights"], expected)
        assert value["outer"] == values[0]["outer"]
    assert bool(values[0]["outer"]) == bool(outer.momentum)
    assert values[0]["state"] != values[1]["state"]  # The inner optimizers are each worker's own.


def test_with_a_period_of_one_and_a_rate_of_one_it_is_bulk_synchronous_training():
    parts = {"period": 1, "outer": Outer(rate=1.0, momentum=0.0, nesterov=False)}
    run = Run(scripted=7, optimizer="sgd", parts=parts, **UNEVEN)
    for value in results(run_workers(training.train, 3, run)):
        same(value["weights"], training.train_alone(run, 15), tolerance=1e-10)


@pytest.mark.parametrize(("wire", "tolerance"), [("bf16", 2e-3), ("int8", 6e-3)])
def test_on_a_narrow_wire_workers_stay_alike_and_close_to_one_process(wire, tolerance):
    run = Run(scripted=5, optimizer="sgd", parts={"period": 4, "outer": Outer(wire=wire)}, **UNEVEN)
    values = results(run_workers(training.train_locally, 3, run))
    positions = [value["positions"] for value in values]
    options = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
    expected = training.train_locally_alone(run, positions, period=4, outer=options)
    assert 1e-9 < np.abs(np.subtract(values[0]["weights"], expected)).max() < tolerance
    assert all(value["weights"] == values[0]["weights"] for value in values)


@pytest.mark.parametrize(("wire", "step"), [("bf16", 2.0**-8), ("int8", 1 / 254)])
def test_what_rounding_leaves_out_of_a_sum_is_in_the_next(wire, step):
    sums = results(run_workers(training.sum_narrowly, 3, wire, 1000, 20))
    vectors = np.sum([[training.vector_of(rank, each, 1000).numpy() for each in range(20)] for rank in range(3)], 0)
    for each in sums:
        np.testing.assert_array_equal(each, sums[0])
    # However many sums there were: one rounding of each worker's vector, and one of their sum.
    left = np.abs(np.sum(sums[0], 0) - np.sum(vectors, 0)).max()
    assert left < 2 * step * 3 * np.abs(vectors).max()
    assert left > 0


def test_packed_values_are_within_half_a_step_and_what_is_not_finite_stays_so():
    values = torch.linspace(-3, 5, 2 * WIRE_BLOCK)
    values[WIRE_BLOCK:] = 0
    packed = pack(values, "int8")
    assert packed.numel() == round(4 * len(values) * Outer(wire="int8").narrowing)
    np.testing.assert_allclose(unpack(packed, "int8"), values, rtol=0, atol=3 / 254 + 1e-6)
    values[0], values[-1] = float("nan"), float("inf")
    assert not unpack(pack(values, "int8"), "int8").isfinite().any()


@pytest.mark.parametrize("samples", [144, 151])
def test_with_steps_by_speed_each_worker_takes_its_own_number_of_steps(samples):
    # A period has 3 x 4 batches of 4 samples; speeds of 5:5:2 make it 5:5:2.
    run = Run(scheme=told(BY_SPEED, [2, 2, 5]), samples=samples, batch_size=4, epochs=3)
    values = results(run_workers(training.train_by_steps, 3, run))
    taken = [value["taken"] for value in values]
    steps = [Counter(each[:2] for each in own) for own in taken]
    assert [each[1, 0] for each in steps] == [5, 5, 2]
    last = [part[2] for own in taken for part in own if part[0] == 2]
    assert sorted(number for part in last for number in part) == [*range(samples)]
    options = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
    expected = training.train_steps_alone(run, taken, options)
    for value in values:
        same(value["weights"], expected)


def test_workers_settle_between_two_periods_only():
    run = Run(scheme=BY_SPEED, samples=90)
    outcomes = run_workers(training.settle_after_a_batch, 2, run)
    assert all("between two batches of a step" in outcome.error for outcome in outcomes)


def test_steps_by_speed_need_batches_of_one_worker():
    loader = DataLoader(TensorDataset(torch.ones(32, 2)), batch_sampler=[[*range(8)], [*range(8, 12)]])
    model = torch.nn.Linear(2, 1)
    with pytest.raises(ConfigError, match="steps=speed counts batches of one worker"):
        next(iter(evenstep.prepare(model, torch.optim.SGD(model.parameters()), loader, scheme=BY_SPEED)[2]))


def test_a_resumed_run_goes_on_with_the_outer_momentum():
    run = Run(scheme="diloco:period=2", samples=90, epochs=3)
    whole = results(run_workers(training.train, 3, run))
    resumed = results(run_workers(training.train_and_resume, 3, run, 8))
    for one, other in zip(whole, resumed, strict=True):
        same(one["weights"], other["weights"])


def test_the_string_and_the_parts():
    scheme = parse_scheme("diloco:period=8,outer=sgd,outer_lr=1,load=lb-bsp")
    assert scheme.outer == Outer(rate=1.0, momentum=0.0, nesterov=False)
    assert scheme.load == parse_scheme("lb-bsp").load
    assert parse_scheme("diloco").outer == Outer()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"outer": Outer()}, "give period too"),
        ({"rate": 0.0}, "outer learning rate of 0"),
        ({"momentum": 1.0}, "outer momentum of 1"),
        ({"wire": "int4"}, "wire cannot be 'int4': use float32, bf16 or int8"),
    ],
)
def test_parts_that_cannot_be_are_refused(parts, message):
    with pytest.raises(ConfigError, match=message):
        Scheme(load=bsp().load, **parts) if "outer" in parts else Outer(**parts)
