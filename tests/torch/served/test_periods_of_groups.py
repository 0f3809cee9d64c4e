"""Local steps in groups on servers: the changes of a group's workers are one push, which the outer optimizer takes."""

from itertools import chain

import numpy as np
import pytest
from support import ahead_habits, habits, served_faults, served_training
from support.group_servers import run_grouped
from support.processes import results, run_workers
from support.served import run_served, server_events
from support.training import Run

from evenstep.cluster import parse_cluster
from evenstep.schemes import parse_scheme

pytestmark = pytest.mark.multiprocess

# Claims of 20 samples; the last ones of an epoch are shorter, and some workers have none.
UNEVEN = {"samples": 187, "epochs": 2}
PAIRS = [(0, 1), (2, 3)]


def same(values, expected):
    np.testing.assert_allclose(values, expected, rtol=0, atol=1e-10)


def pushes(run_dir):
    """The worker and the pulled version of each push, and the group that the worker was in."""
    found, groups, now = [], [], ()
    for event in server_events(run_dir):
        now = event.groups if event.kind == "regroup" else now
        if event.kind == "push":
            found.append((event.worker, event.pulled))
            groups.append(tuple(next(each for each in now if event.worker in each)))
    return found, groups


def is_one_process(run, values, run_dir):
    """All workers end with the weights of the algorithm written out, from the samples that each took."""
    found, groups = pushes(run_dir)
    claims = [value["claims"] for value in values]
    for epoch in range(run.epochs):
        steps = chain.from_iterable(own for number, own in chain.from_iterable(claims) if number == epoch)
        assert sorted(chain.from_iterable(steps)) == list(range(run.samples))
    outer, whole = parse_scheme(run.scheme).outer, len(values) * 4 * run.batch_size
    expected = served_training.train_in_periods_alone(run, claims, found, outer, whole, groups=groups)
    for value in values:
        same(value["ended"][-1], expected)


@pytest.mark.parametrize(
    ("scheme", "optimizer", "servers"),
    [
        ("groups=0-1/2-3,outer=delayed,outer_lr=0.5", "momentum", 1),
        ("groups=0-2/3,steps=speed,across=ssp:bound=1,outer=delayed,outer_lr=0.4", "adam", 1),
        ("groups=0-1/2-3,outer=nesterov,outer_lr=0.3,outer_momentum=0.7,servers=2", "sgd", 2),
        ("groups=1,outer=delayed,outer_lr=0.7", "momentum", 1),
    ],
)
def test_it_is_the_mathematics_of_one_process_with_a_model_per_worker(tmp_path, scheme, optimizer, servers):
    run = Run(scheme=f"grouped:period=4,{scheme}", optimizer=optimizer, **UNEVEN)
    values = results(run_served(served_training.train_in_periods, 4, run, run_dir=tmp_path, servers=servers))
    is_one_process(run, values, tmp_path)
    found = pushes(tmp_path)[0]
    assert sum(event.commits for event in server_events(tmp_path, "tally")) < 0.8 * len(found)


@pytest.mark.parametrize("behind", [[1], [0, 1]])
def test_a_server_of_the_group_sums_its_changes(tmp_path, behind):
    run = Run(scheme="grouped:groups=0-1/2-3,period=4,outer=delayed,outer_lr=0.5", optimizer="adam", **UNEVEN)
    values = results(run_grouped(served_training.train_in_periods, PAIRS, run, run_dir=tmp_path, behind=behind))
    is_one_process(run, values, tmp_path)


@pytest.mark.parametrize("outer", ["delayed", "nesterov"])
def test_one_group_is_diloco(tmp_path, outer):
    # Sizes of the first epoch by `dbs` are equal, in whole batches, and so both deal out the same samples.
    rule, run = "outer_lr=0.6,outer_momentum=0.8,steps=speed", {"optimizer": "adam", **UNEVEN, "epochs": 1}
    served = Run(scheme=f"grouped:groups=1,period=4,inside=dbs,outer={outer},{rule}", **run)
    values = results(run_served(served_training.train_in_periods, 3, served, run_dir=tmp_path))
    collective = Run(scheme=f"diloco:period=4,load=dbs,{rule}", **run)
    expected = results(run_workers(served_training.train_in_periods, 3, collective))
    assert [value["claims"] for value in values] == [value["claims"] for value in expected]
    for value, other in zip(values, expected, strict=True):
        same(value["ended"], other["ended"])


def test_with_a_period_and_an_outer_rate_of_one_it_is_grouped(tmp_path):
    ended = []
    for scheme in ("grouped:groups=2,across=bsp", "grouped:groups=2,across=bsp,period=1"):
        run = Run(scheme=scheme, optimizer="sgd", **UNEVEN)
        values = results(run_served(served_training.train_in_periods, 4, run, run_dir=tmp_path / scheme[-1]))
        ended.append(values[0]["ended"])
        assert all(value["ended"] == ended[-1] for value in values)
    same(*ended)


def test_groups_change_between_periods(tmp_path):
    speeds = "".join(f'[devices.d{i}]\nper_sample = "{ms} ms"\n' for i, ms in enumerate((1, 4, 1)))
    devices = parse_cluster(speeds + "".join(f'[[workers]]\ndevice = "d{i}"\n' for i in range(3)))
    scheme = "grouped:groups=2,by=speed,period=4,outer=delayed,outer_lr=0.5"
    run = Run(scheme=scheme, optimizer="momentum", samples=600, epochs=2, options={"emulate": devices})
    is_one_process(run, results(run_served(served_training.train_in_periods, 3, run, run_dir=tmp_path)), tmp_path)
    assert server_events(tmp_path, "regroup")[-1].groups == [[0, 2], [1]]


def test_a_batch_that_is_fetched_beyond_a_period_is_refused(tmp_path):
    habit, options = ahead_habits.fetch_one_ahead, {"scheme": "grouped:groups=1,period=2"}
    for said in results(run_served(habits.attempt, 2, habit, Run(samples=60), options, run_dir=tmp_path)):
        assert said.endswith("step on each batch before the next is fetched, or use asp, ssp or dssp")


def test_a_worker_killed_in_a_period_behind_its_groups_server_holds_nobody(tmp_path):
    run = Run(scheme="grouped:groups=0-1/2-3,across=ssp:bound=1,period=3", **UNEVEN)
    function, faults = served_faults.train, {(2, "step"): served_faults.Kill()}
    outcomes = run_grouped(function, PAIRS, run, tmp_path, 3, faults, run_dir=tmp_path, behind=[1])
    assert outcomes[3].exitcode == -9
    survivors = results(outcomes[:3])
    assert all(value["ended"] == survivors[0]["ended"] for value in survivors)
    assert served_faults.pushed(tmp_path) == {epoch: list(range(run.samples)) for epoch in range(run.epochs)}
