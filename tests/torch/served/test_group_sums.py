"""Groups whose workers sum gradients among themselves: the same mathematics, and whoever dies in a sum holds nobody."""

import socket

import numpy as np
import pytest
import torch
from support import served_faults, served_training
from support.processes import results
from support.served import leaves, run_served, server_events
from support.training import Run

from evenstep.launch.loopback import loopback_store

pytestmark = pytest.mark.multiprocess

LEADERS = "grouped:groups=0-2/3-4,push_to=leader"
HEARTBEAT_SECONDS = 2.0


def whole(run):
    return {epoch: list(range(run.samples)) for epoch in range(run.epochs)}


@pytest.mark.parametrize("options", ["inside=lb-bsp,clip=100", "across=ssp:bound=1"])
def test_one_group_that_sums_up_is_one_process(tmp_path, options):
    run = Run(scheme=f"grouped:groups=1,{options},push_to=leader", samples=77, epochs=2)
    for value in results(run_served(served_training.train, 3, run, run_dir=tmp_path)):
        np.testing.assert_allclose(value["ended"], served_training.train_alone(run, 15), rtol=0, atol=1e-10)


def test_half_precision_is_summed_in_float32_and_rounded_once(tmp_path):
    run = Run(scheme="grouped:groups=1,push_to=leader", samples=60, epochs=1, dtype=torch.bfloat16)
    one, *others = results(run_served(served_training.train, 3, run, run_dir=tmp_path))
    assert all(other["ended"] == one["ended"] for other in others)
    np.testing.assert_allclose(one["ended"], served_training.train_alone(run, 15), rtol=0, atol=0.02)


def test_groups_sum_up_whatever_is_between_them(tmp_path):
    run = Run(scheme=f"{LEADERS},across=ssp:bound=1,inside=lb-bsp", samples=160, epochs=2, num_workers=1)
    values = results(run_served(served_faults.train_summing, 5, run, tmp_path, -1, 0, "", run_dir=tmp_path))
    assert served_faults.pushed(tmp_path) == whole(run)
    for group in ((0, 1, 2), (3, 4)):
        rings = [values[worker]["rings"] for worker in group]
        assert len(rings[0]) > 8
        assert rings == [[1] * len(rings[0])] * len(group)


@pytest.mark.parametrize(
    ("when", "victim", "number"), [("before", 0, 1), ("before", 2, 3), ("after", 0, 3), ("after", 2, 1)]
)
def test_a_worker_killed_in_a_sum_voids_the_iteration_and_the_group_is_formed_anew(tmp_path, when, victim, number):
    run = Run(scheme=f"{LEADERS},across=ssp:bound=2", samples=154, epochs=2)
    outcomes = run_served(
        served_faults.train_summing, 5, run, tmp_path, victim, number, when, run_dir=tmp_path,
        heartbeat_seconds=HEARTBEAT_SECONDS,
    )  # fmt: skip
    assert outcomes[victim].exitcode == -9
    others = [outcome for worker, outcome in enumerate(outcomes) if worker != victim]
    survivors = results(others)
    assert all(value["ended"][-1] == survivors[0]["ended"][-1] for value in survivors)
    # The first ring until the fault, and another after it; the other group never notices.
    rings = survivors[0 if victim else 1]["rings"]
    assert rings[:number] == [1] * number
    assert set(rings[number:]) == {2}
    assert set(survivors[-1]["rings"]) == {1}
    assert sum(event["samples"] for event in server_events(tmp_path, "push")) == run.epochs * run.samples
    assert {worker for worker, why in leaves(tmp_path).items() if why[0] == "has ended"} >= {0, 1, 2}


def test_a_sum_that_fails_raises_nothing_in_the_script_and_loses_no_sample(tmp_path):
    run = Run(scheme=f"{LEADERS},across=bsp", samples=154, epochs=2)
    values = results(
        run_served(
            served_faults.train_summing, 5, run, tmp_path, 1, 2, "within", run_dir=tmp_path,
            heartbeat_seconds=HEARTBEAT_SECONDS,
        )
    )  # fmt: skip
    assert all(value["ended"][-1] == values[0]["ended"][-1] for value in values)
    assert values[1]["rings"][:3] == [1, 1, 2]
    assert sum(event["samples"] for event in server_events(tmp_path, "push")) == run.epochs * run.samples


def test_a_group_server_killed_in_a_sum_is_started_again_and_no_sample_is_lost(tmp_path):
    run = Run(scheme=f"{LEADERS},across=ssp:bound=1", samples=154, epochs=2)
    values = results(run_served(served_faults.train_summing, 5, run, tmp_path, 0, 2, "server", run_dir=tmp_path))
    assert all(value["ended"][-1] == values[0]["ended"][-1] for value in values)
    assert sum(event["samples"] for event in server_events(tmp_path, "push")) == run.epochs * run.samples
    joined = sorted(event["worker"] for event in server_events(tmp_path, "join"))
    assert joined == [0, 0, 1, 1, 2, 2, 3, 4]


def test_where_workers_find_each_other_is_on_this_host_alone():
    store = loopback_store()
    socket.create_connection(("127.0.0.1", store.port), 5.0).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port), 5.0)
