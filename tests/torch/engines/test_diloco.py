"""DiLoCo: workers that train alone, and an outer optimizer that steps along the mean change of their models."""

from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from support import local_habits, training
from support.ahead_habits import ahead
from support.processes import results, run_workers
from support.told_speeds import told
from support.training import Run
from torch.utils.data import DataLoader, TensorDataset

import evenstep
from evenstep.core.errors import ConfigError
from evenstep.schemes import Outer, Scheme, bsp, parse_scheme
from evenstep.schemes.scheme import NARROWING, WIRE_BLOCK
from evenstep.tensors.narrow import pack, unpack

pytestmark = [pytest.mark.multiprocess, pytest.mark.xdist_group("diloco")]

# 3 workers x 5 = 15 a slice: 5 whole slices and one of 4, too few for all, so that windows of 4 end in mid-window.
BY_SPEED = "diloco:period=4,steps=speed"
UNEVEN = {"samples": 79, "epochs": 4}
OUTERS = [
    ("momentum", Outer()),
    ("adam", Outer(rate=0.5, momentum=0.8, nesterov=False)),
    ("adam", Outer(rate=0.9, momentum=0.0, nesterov=False)),
]
# The model has tensors of 384, 64, 64 and 8 bytes.
STREAMS = [
    ("momentum", Outer(fragments=2), [0, 1, 1, 1]),
    ("adam", Outer(fragments=3, alpha=0.5), [0, 1, 2, 2]),
    ("sgd", Outer(fragments=4, alpha=0.25), [0, 1, 2, 3]),
    ("sgd", Outer(alpha=0.25), [0, 0, 0, 0]),
    ("momentum", Outer(alpha=0.25, delay=3), [0, 0, 0, 0]),
    ("adam", Outer(fragments=2, alpha=0.5, delay=1), [0, 1, 1, 1]),
    ("sgd", Outer(fragments=2, delay=1), [0, 1, 1, 1]),
]
WIRES = [("bf16", 2e-3, {}), ("int8", 6e-3, {}), ("int8", 6e-3, {"fragments": 2})]
STREAM = Run(scheme="diloco:period=5,fragments=2,alpha=0.25", samples=90, epochs=3)
LATE = replace(STREAM, scheme="diloco:period=5,fragments=2,alpha=0.25,delay=1")
EVERY_STEP = Run(
    scripted=7,
    optimizer="sgd",
    parts={"period": 1, "outer": Outer(rate=1.0, momentum=0.0, nesterov=False)},
    **UNEVEN,
)
RESUMED = Run(scheme="diloco:period=2", samples=90, epochs=3)


def outer_run(optimizer, outer):
    return Run(scripted=5, optimizer=optimizer, parts={"period": 4, "outer": outer}, **UNEVEN)


def wire_run(wire, parts):
    return outer_run("sgd", Outer(wire=wire, **parts))


def steps_run(samples, num_workers=0):
    # A period has 3 x 4 batches of 4 samples; speeds of 5:5:2 make it 5:5:2.
    scheme = parse_scheme(BY_SPEED)
    scheme = told(replace(scheme, load=replace(scheme.load, warmup=0)), [2, 2, 5])
    return Run(scheme=scheme, samples=samples, batch_size=4, epochs=3, num_workers=num_workers)


STEPS = {
    "steps": (steps_run(144), iter, [5, 4, 3]),
    "steps, short": (steps_run(151), iter, [5, 4, 3]),
    "steps, data workers": (steps_run(144, num_workers=2), iter, [5, 4, 3]),
    "steps, ahead": (steps_run(144), partial(ahead, depth=2), [4, 4, 4]),
}
"""Runs, how their batches are fetched, and the steps of each worker in the first period."""


@pytest.fixture(scope="module")
def ran():
    """The values of each run by worker, all runs in one start of the workers."""
    calls = {
        **{f"outer {number}": outer_run(*each) for number, each in enumerate(OUTERS)},
        **{f"stream {number}": outer_run(*each[:2]) for number, each in enumerate(STREAMS)},
        **{f"wire {wire} {parts}": wire_run(wire, parts) for wire, _, parts in WIRES},
    }
    calls = {name: (training.train_locally, run) for name, run in calls.items()}
    calls["whole"] = training.train, STREAM
    calls["end of epoch"] = training.settle_and_go_on, STREAM, 6
    for stop_after in (8, 9):
        calls[f"resumed {stop_after}"] = training.train_and_resume, STREAM, stop_after
        calls[f"settled {stop_after}"] = training.settle_and_go_on, STREAM, stop_after
    calls["broke"] = training.settle_after_the_data_broke, STREAM, 2
    calls["spoilt"] = training.spoil_a_worker, STREAM
    calls["by speed"] = training.train, Run(scheme="diloco:period=6,fragments=3,load=lb-bsp", samples=180, epochs=2)
    calls["delayed"] = training.train, LATE
    for stop_after in (8, 9):
        calls[f"delayed, resumed {stop_after}"] = training.train_and_resume, LATE, stop_after
        calls[f"delayed, settled {stop_after}"] = training.settle_and_go_on, LATE, stop_after
    calls["spoilt, delayed"] = training.spoil_a_worker, LATE
    calls["every step"] = training.train, EVERY_STEP
    calls["skipped"] = local_habits.skip_where_sizes_change, steps_run(144), 1, 3
    calls |= {name: (training.train_by_steps, *each[:2]) for name, each in STEPS.items()}
    calls["one run"], calls["resumed"] = (training.train, RESUMED), (training.train_and_resume, RESUMED, 8)
    values = results(run_workers(training.in_turn, 3, calls))
    return {name: [value[name] for value in values] for name in calls}


def same(value, expected, tolerance=1e-12):
    np.testing.assert_allclose(value, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("number", range(len(OUTERS)))
def test_it_is_the_mathematics_of_one_process_with_a_model_per_worker(ran, number):
    optimizer, outer = OUTERS[number]
    values = ran[f"outer {number}"]
    assert any(not positions for value in values for _, _, positions, _ in value["positions"])
    options = {"lr": outer.rate, "momentum": outer.momentum, "nesterov": outer.nesterov}
    positions = [value["positions"] for value in values]
    expected = training.train_locally_alone(outer_run(optimizer, outer), positions, period=4, outer=options)
    for value in values:
        same(value["weights"], expected)
        assert value["outer"] == values[0]["outer"]
    assert bool(values[0]["outer"]) == bool(outer.momentum)
    assert values[0]["state"] != values[1]["state"]  # The inner optimizers are each worker's own.


@pytest.mark.parametrize("number", range(len(STREAMS)))
def test_fragments_are_the_mathematics_of_streaming_diloco_in_one_process(ran, number):
    optimizer, outer, cut = STREAMS[number]
    values = ran[f"stream {number}"]
    positions = [value["positions"] for value in values]
    expected = training.stream_alone(outer_run(optimizer, outer), positions, 4, cut, outer.alpha, outer.delay)
    for value, own in zip(values, expected, strict=True):
        same(value["weights"], own, tolerance=1e-10)
        assert value["outer"] == values[0]["outer"]
    assert expected[0] == expected[1]


@pytest.mark.parametrize("which", ["", "delayed, "])
def test_fragments_resume_exactly_wherever_the_run_was_saved(ran, which):
    # Where a fragment meets, and where none does; with a delay also where one is under way.
    for stop_after in (8, 9):
        settled = ran[f"{which}settled {stop_after}"]
        assert all(value["settled"] == settled[0]["settled"] for value in settled)
        for one, other in zip(settled, ran[f"{which}resumed {stop_after}"], strict=True):
            same(one["weights"], other["weights"])
    assert ran["end of epoch"][0]["weights"] == ran["whole"][0]["weights"]
    assert np.abs(np.subtract(ran["resumed 9"][0]["weights"], ran["whole"][0]["weights"])).max() > 1e-6


def test_workers_settle_between_two_meetings_of_fragments(ran):
    values = ran["broke"]
    assert all(value["broke"] for value in values)
    assert values[0]["before"] != values[1]["before"]
    assert all(value["after"] == values[0]["after"] for value in values)


@pytest.mark.parametrize("which", ["spoilt", "spoilt, delayed"])
def test_a_worker_whose_model_is_not_finite_is_left_out_of_every_fragment(ran, which):
    values = ran[which]
    assert [value["skipped"] for value in values] == [0, 1, 0]
    assert np.isfinite(values[1]["weights"]).all()
    assert all(value["weights"] == values[0]["weights"] for value in values)


def test_sizes_by_speed_may_change_at_the_meeting_of_any_fragment(ran):
    values = ran["by speed"]
    assert all(value["weights"] == values[0]["weights"] for value in values)
    assert all(value["sizes"] == values[0]["sizes"] for value in values)


def test_with_a_period_of_one_and_a_rate_of_one_it_is_bulk_synchronous_training(ran):
    for value in ran["every step"]:
        same(value["weights"], training.train_alone(EVERY_STEP, 15), tolerance=1e-10)


@pytest.mark.parametrize(("wire", "tolerance", "parts"), WIRES)
def test_on_a_narrow_wire_workers_stay_alike_and_close_to_one_process(ran, wire, tolerance, parts):
    values, run = ran[f"wire {wire} {parts}"], wire_run(wire, parts)
    positions = [value["positions"] for value in values]
    cut = [0, 1, 1, 1] if parts else [0, 0, 0, 0]
    expected = training.stream_alone(run, positions, 4, cut, 0.0)[0]
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
    assert packed.numel() == round(4 * len(values) * NARROWING["int8"])
    np.testing.assert_allclose(unpack(packed, "int8"), values, rtol=0, atol=3 / 254 + 1e-6)
    values[0], values[-1] = float("nan"), float("inf")
    assert not unpack(pack(values, "int8"), "int8").isfinite().any()


@pytest.mark.parametrize("name", STEPS)
def test_with_steps_by_speed_each_worker_takes_its_own_number_of_steps(ran, name):
    values, (run, _, first) = ran[name], STEPS[name]
    taken = [value["taken"] for value in values]
    steps = [Counter(each[:2] for each in own) for own in taken]
    assert [each[1, 0] for each in steps] == [5, 5, 2]
    # Two steps each, and of the batches that nobody has fetched then, six or three, each by its speed.
    assert [each[0, 0] for each in steps] == first
    last = [part[2] for own in taken for part in own if part[0] == 2]
    assert sorted(number for part in last for number in part) == [*range(run.samples)]
    options = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
    expected = training.train_steps_alone(run, taken, options)
    for value in values:
        same(value["weights"], expected)


def test_a_worker_that_skips_the_last_step_of_a_period_alone_is_told_to_compute_it(ran):
    for said in ran["skipped"]:
        assert "worker 1 has the batch sizes" in said
        assert "compute every batch of a local period" in said


def test_workers_settle_between_two_periods_only():
    run = Run(scheme=BY_SPEED, samples=90)
    outcomes = run_workers(training.settle_after_a_batch, 2, run)
    assert all("between two batches of a step" in outcome.error for outcome in outcomes)


def test_steps_by_speed_need_batches_of_one_worker():
    loader = DataLoader(TensorDataset(torch.ones(32, 2)), batch_sampler=[[*range(8)], [*range(8, 12)]])
    model = torch.nn.Linear(2, 1)
    with pytest.raises(ConfigError, match="the period counts batches of one worker"):
        next(iter(evenstep.prepare(model, torch.optim.SGD(model.parameters()), loader, scheme=BY_SPEED)[2]))


def test_a_resumed_run_goes_on_with_the_outer_momentum(ran):
    for one, other in zip(ran["one run"], ran["resumed"], strict=True):
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
        ({"fragments": 0}, "cannot be cut into 0 fragments: use 1 or more"),
        ({"alpha": 1.0}, "alpha from 0 to below 1"),
        ({"delay": -1}, "delay of 0 or more"),
        ({"delay": 1, "wire": "int8"}, "narrow wire has two hops"),
        ({"period": 6, "outer": Outer(fragments=2, delay=3)}, "comes 3 iterations after the last"),
        ({"period": 4, "outer": Outer(delay=1), "steps": "speed"}, "fragments meet, and differences arrive, between"),
        ({"period": 3, "outer": Outer(fragments=4)}, "period of 3: use 3 or fewer"),
        ({"period": 4, "outer": Outer(fragments=4), "steps": "speed"}, "leave out one of them, or use load=lb-bsp"),
    ],
)
def test_parts_that_cannot_be_are_refused(parts, message):
    with pytest.raises(ConfigError, match=message):
        Scheme(load=bsp().load, **parts) if "outer" in parts else Outer(**parts)


def test_a_model_has_at_most_as_many_fragments_as_parameters():
    loader, model = DataLoader(TensorDataset(torch.ones(32, 2)), batch_size=8), torch.nn.Linear(2, 1)
    with pytest.raises(ConfigError, match="2 parameter tensors cannot be cut into 3 fragments: use 2 or fewer"):
        evenstep.prepare(model, torch.optim.SGD(model.parameters()), loader, scheme="diloco:fragments=3")
