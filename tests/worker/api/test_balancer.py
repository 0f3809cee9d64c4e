"""A training loop without torch: NumPy workers in real processes train as one process does."""

import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from support import any_framework
from support.any_framework import EPOCHS, GLOBAL, LENGTH, WORKERS

import evenstep
from evenstep.report.summary import summarise
from evenstep.schemes import Scheme
from evenstep.telemetry import read_events
from evenstep.telemetry.events import IterationDone
from evenstep.testing.scripted import Scripted

pytestmark = pytest.mark.xdist_group("balancer")

BARRIERS = {
    "bsp": "bsp",
    "lb-bsp": "lb-bsp",
    "dbs": "dbs",
    "sizes that always change": Scheme(name="scripted", load=Scripted(seed=11)),
    "sizes by hand": evenstep.schemes.static([30, 12, 6]),
}
BY_ENVIRONMENT = "sizes by the environment"
TRAINED = [*BARRIERS, "resumed", BY_ENVIRONMENT]
UNLIKE = {
    "length": ({"length": LENGTH + 1}, "DisagreementError: worker 2 has an epoch of 201 samples where the others"),
    "scheme": ({"scheme": "dbs"}, "DisagreementError: worker 2 has the scheme 'dbs' where the others have 'lb-bsp'"),
    "seed": ({"seed": 6}, "DisagreementError: worker 2 has a seed of 6 for the order of samples"),
    "smallest": (
        {"smallest_batch": 20},
        "ConfigError: the global batch size 48 is less than 3 workers with at least 20",
    ),
    "wrong": ({"length": 0}, "ConfigError: worker 2: length must be a whole number from 1"),
    "served": (
        {"scheme": "ssp"},
        "ConfigError: worker 2: the scheme 'ssp' trains on parameter servers",
    ),
    "rank": ({"as_rank": 1}, "ConfigError: all_gather returned a row of worker 1 in the place of worker 2: it must"),
}
SKIPS = {
    "compute": "ConfigError: worker 2: the compute of iteration 1 was not reported: put it inside `with balancer.com",
    "epoch": "DisagreementError: worker 2 is in epoch 1 where the others are in 0: loop over the same epochs on",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What every job came to on each worker, from one start of the workers."""
    jobs = {name: (any_framework.balanced, {"scheme": scheme}) for name, scheme in BARRIERS.items()}
    sizes = {"EVENSTEP_BATCH_SIZES": f"rank:2=6,rank:0=30,host:{socket.gethostname()}=12"}
    jobs[BY_ENVIRONMENT] = any_framework.in_environment, {"scheme": None, "variables": sizes}
    jobs["resumed"] = any_framework.balanced, {"scheme": "lb-bsp", "stop_after": 7}
    run_dir = tmp_path_factory.mktemp("runs")
    jobs["recorded"] = any_framework.balanced, {"scheme": "lb-bsp", "run_dir": str(run_dir)}
    jobs |= {f"unlike {name}": (any_framework.unlike, given) for name, (given, _) in UNLIKE.items()}
    jobs |= {f"skips {skip}": (any_framework.skipping, {"skip": skip}) for skip in SKIPS}
    return [*any_framework.run(jobs), run_dir]


@pytest.mark.multiprocess
def test_no_worker_imports_torch(found):
    assert [value["torch"] for value in found[:WORKERS]] == [False] * WORKERS


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", TRAINED)
def test_behind_a_barrier_workers_train_as_one_process(found, name):
    expected = any_framework.alone(any_framework.digits())
    for value in found[:WORKERS]:
        for weight, one in zip(value[name]["weights"], expected, strict=True):
            np.testing.assert_allclose(weight, one, rtol=0, atol=1e-12)


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", TRAINED)
def test_each_position_is_taken_once_in_each_epoch(found, name):
    for epoch in range(EPOCHS):
        taken = [
            each for value in found[:WORKERS] for at, _, part, _ in value[name]["taken"] if at == epoch for each in part
        ]
        assert sorted(taken) == list(range(LENGTH))


@pytest.mark.multiprocess
def test_sizes_by_rank_and_host_are_kept(found):
    for value in found[:WORKERS]:
        assert [sizes for *_, sizes in value[BY_ENVIRONMENT]["taken"] if sum(sizes) == GLOBAL] == [[30, 12, 6]] * 12


@pytest.mark.multiprocess
def test_a_resumed_epoch_goes_on_where_it_was_left(found):
    assert [value["resumed"]["epochs"] for value in found[:WORKERS]] == [[0, 1, 1, 2]] * WORKERS


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["lb-bsp", "dbs", "resumed"])
def test_sizes_follow_the_reported_speeds(found, name):
    sizes = found[0][name]["taken"][-2][3]  # The last slice is short.
    assert sum(sizes) == GLOBAL
    assert max(sizes[0], sizes[1]) > 2 * sizes[2]
    assert found[1][name]["taken"][-2][3] == sizes


@pytest.mark.multiprocess
def test_reports_work_on_the_event_log(found):
    summary = summarise(found[WORKERS])
    assert summary is not None


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", UNLIKE)
def test_workers_that_were_started_differently_are_named_on_all(found, name):
    for rank, value in enumerate(found[:WORKERS]):
        assert value[f"unlike {name}"].startswith(_as_said(UNLIKE[name][1], rank))


@pytest.mark.multiprocess
@pytest.mark.parametrize("skip", SKIPS)
def test_workers_that_do_different_things_are_named_on_all(found, skip):
    for rank, value in enumerate(found[:WORKERS]):
        assert value[f"skips {skip}"].startswith(_as_said(SKIPS[skip], rank))


def _as_said(sentence, rank):
    """Worker 2 does not name itself as the one where something is wrong."""
    return sentence.replace("Error: worker 2: ", "Error: ") if rank == 2 else sentence


def balancer_of(all_gather=None, **given):
    return evenstep.Balancer(
        **{"rank": 0, "workers": 1, "length": 8, "global_batch_size": 4, "all_gather": all_gather} | given
    )


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"rank": 3, "workers": 3}, "rank must be a whole number from 0 to 2, not 3"),
        ({"rank": "0"}, "rank must be a whole number from 0 to 0, not '0'"),
        ({"workers": "2"}, "workers must be a whole number from 1 to 2147483647, not '2'"),
        ({"shuffle": "no"}, "shuffle must be True or False, not 'no'"),
        ({"workers": 2}, "2 workers need a way to each other: start every worker with all_gather"),
        (
            {"workers": 2, "all_gather": lambda row: [row]},
            "all_gather returned 1 rows to worker 0, which was told of 2",
        ),
        (
            {"workers": 2, "all_gather": lambda row: [row, row]},
            "all_gather returned a row of worker 0 in the place of w",
        ),
        (
            {"workers": 2, "all_gather": lambda row: [row, b""]},
            "all_gather returned a row of 0 bytes for worker 1 where",
        ),
        ({"all_gather": lambda row: None}, "all_gather returned None: it must return a list of bytes"),
        (
            {"all_gather": lambda row, first=[]: first or first.append(row) or first},
            "all_gather returned a row of 32 bytes for worker 0 where",
        ),
        ({"scheme": "local-sgd"}, "the scheme 'local-sgd' averages weights and not gradients: let the"),
        (
            {"scheme": "diloco:fragments=2", "averages": True},
            "the steps of 'diloco:fragments=2' run on PyTorch only: use local-sgd here",
        ),
        ({"scheme": "lb-bsp:micro_batch=2"}, "a Balancer hands out whole shares: leave out micro_batch"),
        ({"scheme": "lbsp"}, "there is no scheme 'lbsp'"),
        (
            {"scheme": "static:5"},
            "the batch sizes [5] add up to 5, not to the global batch size 4: correct one of them",
        ),
        ({"scheme": "static:gpu:X=4"}, "there is a batch size of 'gpu:X', which matches no worker: choose one of"),
        ({"seed": 2**64}, "seed must be a whole number of at most 64 bits, not 18446744073709551616"),
        ({"run_dir": 7}, "run_dir must be the path of a folder, not 7"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(given, sentence):
    with pytest.raises(evenstep.ConfigError, match="^" + re.escape(sentence)):
        balancer_of(**given)


def test_compute_is_reported_once_for_each_share():
    balancer = balancer_of()
    with pytest.raises(evenstep.ConfigError, match=r"^there is no current share"):
        balancer.report(1.0)
    for share in balancer.epoch():
        for wrong in (-1, 1e300, float("nan"), "1", None):
            with pytest.raises(evenstep.ConfigError, match=r"report takes the seconds .* a number from 0 to 1e"):
                balancer.report(wrong)
        with pytest.raises(evenstep.ConfigError, match="note takes numbers"):
            balancer.note(loss="low")
        balancer.report(0 if share.iteration else 1e6)
        with pytest.raises(
            evenstep.ConfigError, match=f"the compute of iteration {share.iteration} was reported already"
        ):
            balancer.report(1.0)


def test_under_local_sgd_shares_say_where_weights_are_averaged_and_the_state_is_refused_between():
    balancer = balancer_of(scheme="local-sgd:period=2", averages=True, length=12)
    found = []
    for share in balancer.epoch():
        assert share.weight == 1
        balancer.report(1.0)
        found.append(share.average)
        if share.average is None:
            with pytest.raises(evenstep.ConfigError, match="own until the next average: save between epochs"):
                balancer.state_dict()
        else:
            balancer.state_dict()
    assert found == [None, 1, 1]  # The end of an epoch ends a period.


def test_a_period_is_one_iteration_of_the_event_log_and_has_all_of_its_compute(tmp_path):
    balancer = balancer_of(scheme="local-sgd:period=2", averages=True, length=12, run_dir=tmp_path)
    for _ in balancer.epoch():
        balancer.report(1.0)
    balancer.close()
    done = [(each.samples, each.compute_seconds) for each in read_events(tmp_path, kind=IterationDone)]
    assert done == [(8, 2.0), (4, 1.0)]


def test_a_share_that_was_only_looked_at_is_no_part_of_its_period():
    balancer = balancer_of(scheme="local-sgd:period=2", averages=True)
    next(balancer.epoch(0))
    averages = []
    for share in balancer.epoch(0):
        balancer.report(1.0)
        averages.append(share.average)
    assert averages == [None, 1]


def test_numbers_of_numpy_are_taken():
    names = ("rank", "workers", "length", "global_batch_size", "seed", "smallest_batch", "largest_batch")
    given = {name: np.int64(value) for name, value in zip(names, (0, 1, 8, 4, 3, 1, 4), strict=True)}
    balancer = balancer_of(**given, shuffle=np.True_)
    for share in balancer.epoch(np.int64(1)):
        balancer.report(np.float32(1))
        assert share.positions.dtype == share.indices.dtype == np.int64
    assert json.loads(json.dumps(balancer.state_dict())) == balancer.state_dict()


def test_arrays_can_be_indexed_with_a_share():
    data = np.arange(16).reshape(8, 2)
    balancer = balancer_of(shuffle=False)
    for share in balancer.epoch():
        np.testing.assert_array_equal(data[share.positions], data[share.iteration * 4 : share.iteration * 4 + 4])
        np.testing.assert_array_equal(torch.from_numpy(data)[share.positions].numpy(), data[share.indices])
        balancer.report(1.0)


def test_the_next_share_is_known_as_far_as_sizes_stay():
    balancer, planned, taken = balancer_of(length=11, seed=3), [], []
    assert balancer.planned is None
    for share in balancer.epoch():
        planned.append(balancer.planned)
        taken.append(share.indices.tolist())
        balancer.report(1.0)
    *others, last = planned
    assert [share.indices.tolist() for share in others] == taken[1:]
    assert [share.iteration for share in others] == [1, 2]
    assert last is None is balancer.planned


def test_a_state_of_other_data_is_refused():
    state = balancer_of().state_dict()
    with pytest.raises(evenstep.ConfigError, match="this state has the length 8 and not 9: resume with the same"):
        balancer_of(length=9).load_state_dict(state)
    with pytest.raises(evenstep.ConfigError, match="damaged"):
        balancer_of().load_state_dict({**state, "epoch": -1})


def test_only_the_compute_is_timed(tmp_path):
    balancer = balancer_of(run_dir=tmp_path)
    for _ in balancer.epoch():
        spin(0.02)
        with balancer.compute():
            spin(0.01)
        spin(0.02)
    balancer.close()
    done = list(read_events(tmp_path, kind=IterationDone))
    assert len(done) == 2
    for each in done:
        assert 0.01 <= each.compute_seconds <= each.iteration_seconds - 0.04


def spin(seconds):
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def together(script, scheme, workers=2):
    """What the script returns on each worker, for which it is called with the worker's balancer, in threads."""
    rows, meeting = [b""] * workers, threading.Barrier(workers)

    def worker(rank):
        def all_gather(row):
            rows[rank] = row
            meeting.wait()
            came = list(rows)
            meeting.wait()
            return came

        return script(balancer_of(all_gather, scheme=scheme, rank=rank, workers=workers, averages=True), rank)

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(worker, range(workers)))


def test_shares_are_weighed_by_units():
    def script(balancer, rank):
        for share in balancer.epoch():
            balancer.weigh_by(0 if share.iteration == 1 else 1 + 2 * rank)
            balancer.report(0.1)
            yield balancer.share.weight

    first, second = together(lambda *given: list(script(*given)), "bsp")
    assert (first[0], second[0]) == (1 / 4, 3 / 4)
    assert (first[1], second[1]) == (0.0, 0.0)


def test_averages_are_weighed_by_the_units_since_the_last():
    def script(balancer, rank):
        for share in balancer.epoch():
            balancer.weigh_by(1 + 2 * rank * (share.iteration == 0))
            balancer.report(0.1)
            yield balancer.share.average

    first, second = together(lambda *given: list(script(*given)), "local-sgd:period=2")
    assert first[:2] == [None, 2 / 6]
    assert second[:2] == [None, 4 / 6]


def test_averages_without_any_units_are_of_equal_weights():
    def script(balancer, rank):
        for _ in balancer.epoch():
            balancer.weigh_by(0)
            balancer.report(0.1 * (1 + rank))
            yield balancer.share.average

    both = together(lambda *given: list(script(*given)), "local-sgd:period=2")
    assert [each[:2] for each in both] == [[None, 1 / 2]] * 2


def test_units_on_one_worker_alone_are_refused():
    def script(balancer, rank):
        for _ in balancer.epoch():
            if rank:
                balancer.weigh_by(3)
            said = r"^worker 1 weighs by 'units' where worker 0 weighs by 'samples': call weigh_by on every worker or"
            with pytest.raises(evenstep.DisagreementError, match=said):
                balancer.report(0.1)
            break

    together(script, "bsp")


def test_a_gradient_that_is_not_finite_weighs_nothing_or_is_refused():
    def script(balancer, rank):
        for _ in balancer.epoch():
            balancer.report(0.1, finite=not rank)
            return balancer.share.weight

    with pytest.warns(UserWarning, match=r"^worker 1 left out its gradient of iteration 0, which holds a NaN"):
        assert together(script, "lb-bsp") == [0.5, 0.0]
    assert together(script, "lb-bsp:nonfinite=spread") == [0.5, 0.5]
