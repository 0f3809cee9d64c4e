"""The schemes on parameter servers, in a loop of each framework around `evenstep.Client`."""

import numpy as np
import pytest
from support.frameworks.servers import servers
from support.frameworks.start import run
from support.frameworks.table import FRAMEWORKS, require
from support.frameworks.task import EPOCHS, LENGTH, WORKERS, Job, first_weights, loss_of

pytestmark = [pytest.mark.multiprocess, pytest.mark.xdist_group("served_by_frameworks")]

BARRIER = "bsp:engine=server"
SCHEMES = [BARRIER, "ssp:bound=2", "dssp", "asp:load=lb-bsp", "grouped:groups=0/1+2"]


@pytest.fixture(scope="module", params=[name for name, row in FRAMEWORKS.items() if row.served])
def found(request, tmp_path_factory):
    """What every scheme came to on each worker, from one start of the workers."""
    require(request.param)
    with servers(SCHEMES) as started:
        jobs = {scheme: Job(scheme=scheme, servers=started[scheme]) for scheme in SCHEMES}
        values = run(request.param, jobs, tmp_path_factory.mktemp(request.param))
    for rank, value in enumerate(values):
        assert value is not None, f"worker {rank} is gone"
        assert "error" not in value, f"worker {rank}: {value['error']}"
    return values


@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_sample_is_committed_once_in_each_epoch(found, scheme):
    taken = [index for value in found for indices, _ in value[scheme]["taken"] for index in indices]
    assert sorted(taken) == sorted([*range(LENGTH)] * EPOCHS)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_all_workers_end_with_the_same_weights_which_have_learned(found, scheme):
    for value in found:
        for weight, same in zip(value[scheme]["weights"], found[0][scheme]["weights"], strict=True):
            np.testing.assert_array_equal(weight, same)
    assert loss_of(found[0][scheme]["weights"]) < loss_of(first_weights("float64")) / 2


def test_behind_a_barrier_the_weights_are_those_of_one_process(found):
    for value in found[:WORKERS]:
        for weight, one in zip(value[BARRIER]["weights"], found[0]["alone", "float32", False], strict=True):
            np.testing.assert_allclose(weight, one, rtol=0, atol=1e-6)
