"""Promise 1 on servers: with a barrier they are the collective engine, and one process; all leave an epoch alike."""

import numpy as np
import pytest
from support import served_training
from support.processes import results, run_workers
from support.served import run_served
from support.training import Run

pytestmark = pytest.mark.multiprocess

# 3 workers x 5 = 15 a slice: 5 whole slices, and a last one of 2 that leaves a worker with nothing.
UNEVEN = {"samples": 77, "epochs": 2}


def close(values, expected):
    for value in values:
        np.testing.assert_allclose(value["ended"], expected, rtol=0, atol=1e-10)


def each_once(values, run):
    """Every position of every epoch was handed out once, over all workers."""
    for epoch in range(run.epochs):
        positions = [position for value in values for part in value["positions"][epoch] for position in part]
        assert sorted(positions) == list(range(run.samples))


@pytest.mark.parametrize(
    ("optimizer", "parameters", "servers", "num_workers", "network"),
    [
        ("momentum", "", 1, 0, False),
        ("adam", ",load=lb-bsp", 2, 0, False),
        ("momentum", ",load=lb-bsp:predictor=ema;minimum=2", 2, 0, True),
        ("adam", "", 1, 1, True),
    ],
)
def test_servers_under_a_barrier_are_one_process(tmp_path, optimizer, parameters, servers, num_workers, network):
    scheme = f"bsp:engine=server,servers={servers}{parameters}"
    run = Run(scheme=scheme, optimizer=optimizer, num_workers=num_workers, **UNEVEN)
    values = results(run_served(served_training.train, 3, run, run_dir=tmp_path, servers=servers, network=network))
    close(values, served_training.train_alone(run, 15))
    each_once(values, run)


@pytest.mark.parametrize("optimizer", ["Adadelta", "Adamax", "NAdam", "RAdam", "own"])
def test_further_optimizers_under_a_barrier_are_one_process(tmp_path, optimizer):
    own = "support.own_optimizers:Signs"
    run = Run(scheme=f"bsp:engine=server,optimizer={own}", optimizer=optimizer, samples=37)
    values = results(run_served(served_training.train, 2, run, run_dir=tmp_path, allow=[own]))
    close(values, served_training.train_alone(run, 10))


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_servers_under_a_barrier_are_the_collective_engine(tmp_path, optimizer):
    run = Run(scheme="bsp:engine=server", optimizer=optimizer, **UNEVEN)
    values = results(run_served(served_training.train, 3, run, run_dir=tmp_path))
    collective = results(run_workers(served_training.train, 3, Run(scheme="bsp", optimizer=optimizer, **UNEVEN)))
    close(values, collective[0]["ended"])


@pytest.mark.parametrize(
    ("scheme", "servers", "num_workers"),
    [
        ("asp", 1, 0),
        ("asp:exchange=overlapped,servers=2", 2, 1),
        ("ssp:bound=1,load=lb-bsp", 1, 0),
        ("ssp:bound=2,exchange=overlapped", 1, 0),
        ("dssp:lower=1,upper=4,servers=2", 2, 0),
    ],
)
def test_all_workers_leave_each_epoch_with_the_same_weights(tmp_path, scheme, servers, num_workers):
    run = Run(scheme=scheme, num_workers=num_workers, **UNEVEN)
    values = results(run_served(served_training.train, 3, run, run_dir=tmp_path, servers=servers))
    assert values[0]["ended"] == values[1]["ended"] == values[2]["ended"]
    assert len({tuple(ended) for ended in values[0]["ended"]}) == run.epochs
    each_once(values, run)
