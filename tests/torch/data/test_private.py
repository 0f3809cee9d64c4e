"""`partition="private"`: each worker trains on its own dataset, of any length, and models are averaged by samples."""

import json

import numpy as np
import pytest
from support import own_data
from support.own_data import LENGTHS
from support.processes import results, run_workers

from evenstep.telemetry import read_events

pytestmark = pytest.mark.multiprocess

EPOCHS = 3
ITERATIONS = 6  # 34 samples in slices of 3 x 2.


@pytest.mark.parametrize("processes", [0, 2])
def test_each_sample_of_each_dataset_once_an_epoch(processes, tmp_path):
    found = results(
        run_workers(
            own_data.train_private,
            3,
            "local-sgd:period=2",
            EPOCHS,
            {"processes": processes, "run_dir": str(tmp_path)},
        )
    )
    for length, value in zip(LENGTHS, found, strict=True):
        assert value["length"] == ITERATIONS
        orders = []
        for epoch in value["seen"]:
            assert len(epoch) == ITERATIONS
            sizes = [len(batch) for batch in epoch]
            assert max(sizes) - min(sizes) <= 1
            orders.append([number for batch in epoch for number in batch])
            assert sorted(orders[-1]) == list(range(length))
        assert orders[0] != orders[1]
    meetings = [event for event in read_events(tmp_path) if event.kind == "iteration" and event.worker == 0]
    assert len(meetings) == EPOCHS * 3


def test_averages_once_an_epoch_are_federated_averaging():
    found = results(run_workers(own_data.train_private, 3, "local-sgd:period=1000", EPOCHS, {}))
    expected = own_data.train_federated([value["seen"] for value in found], EPOCHS)
    for value in found:
        np.testing.assert_allclose(value["weights"], expected, rtol=0, atol=1e-12)
    assert np.abs(np.array(expected) - own_data.weights(own_data.federated_model())).max() > 1e-3


def test_a_run_resumes_in_mid_epoch_on_as_many_workers():
    scheme, arguments = "local-sgd:period=2", {"momentum": 0.5}
    whole = results(run_workers(own_data.train_private, 3, scheme, 2, {"stop": 4, **arguments}))
    state = whole[1]["state"]  # The state of any worker serves all.
    assert [value["state"][0]["lengths"] for value in whole] == [list(LENGTHS)] * 3
    resumed = results(run_workers(own_data.train_private, 3, scheme, 2, {"state": state, **arguments}))
    for before, after in zip(whole, resumed, strict=True):
        assert after["seen"] == [before["seen"][0][4:], before["seen"][1]]
        np.testing.assert_allclose(after["weights"], before["weights"], rtol=0, atol=1e-12)
    (told, _) = results(run_workers(own_data.resume_elsewhere, 2, state[0]))
    assert told.startswith("this loader state is of private datasets of [23, 8, 3] samples but the run has a common")
    json.dumps(state[0])


CASES = [
    (("local-sgd:load=lb-bsp", {}, {}), "or local-sgd with equal sizes"),
    (("asp:engine=nothing", {}, {}), "engine"),
    (("local-sgd", {"sampler": [1, 0]}, {}), "draws each worker's order from the seed"),
    (("local-sgd", {}, {"empty": "shrink"}), "leave out empty"),
    (("local-sgd", {}, {"partition": "mine"}), "partition must be 'common' or 'private', not 'mine'"),
]


def test_what_does_not_go_with_private_data_is_refused_in_one_sentence():
    found = results(run_workers(own_data.refused, 2, [case for case, _ in CASES]))
    for (_, fragment), *told in zip(CASES, *found, strict=True):
        assert all(fragment in each for each in told)
