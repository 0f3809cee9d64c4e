"""Real training that diverges to finite weights is warned of and written down, and goes on; what goes well is not."""

import numpy as np
import pytest
from support import served_training
from support.processes import results
from support.served import run_served

from evenstep.report.summary import summarise
from evenstep.telemetry import read_events

pytestmark = pytest.mark.multiprocess


def diverging(run_dir):
    return list(read_events(run_dir, kinds=["diverging"]))


@pytest.mark.parametrize("scheme", ["asp", "ssp:bound=1", "dssp:exchange=overlapped"])
def test_training_that_diverges_to_finite_weights_is_warned_of_once_and_goes_on(tmp_path, scheme):
    values = results(run_served(served_training.classify, 2, scheme, 8.0, run_dir=tmp_path))
    for worker, value in enumerate(values):
        assert np.isfinite(value["weights"]).all()
        assert value["accuracy"] < 0.5
        (warned,) = value["warned"]
        assert warned.startswith("training seems to be diverging since iteration ")
        assert f"of worker {worker}" in warned
        assert "lower the learning rate" in warned
    assert [event["worker"] for event in diverging(tmp_path)] == [0, 1]
    assert all(event["since"] < event["iteration"] for event in diverging(tmp_path))
    assert [each.worker for each in summarise(tmp_path).served.diverging] == [0, 1]


@pytest.mark.parametrize("scheme", ["asp", "bsp:engine=server"])
def test_training_that_goes_well_is_not_warned_of(tmp_path, scheme):
    values = results(run_served(served_training.classify, 2, scheme, 0.5, run_dir=tmp_path))
    for value in values:
        assert value["accuracy"] > 0.9
        assert value["warned"] == []
    assert diverging(tmp_path) == []
    assert summarise(tmp_path).served.diverging == ()
