"""Models of the kinds that people write, in every framework: unequal batches reach the weights of one process."""

import numpy as np
import pytest
from support.frameworks.kinds import KINDS
from support.frameworks.start import run
from support.frameworks.table import FRAMEWORKS, require
from support.frameworks.task import Job

pytestmark = [pytest.mark.multiprocess, pytest.mark.xdist_group("kinds")]

ODD = ("shape", "dtype", "optimizer")
JOBS = {kind: Job(scheme="by hand", kind=kind) for kind in KINDS}
JOBS |= {odd: Job(scheme="by hand", kind="dense over time", odd=odd) for odd in ODD}
JOBS["not finite"] = Job(scheme="by hand", kind="dense over time", faulty=True)


@pytest.fixture(scope="module", params=[name for name in FRAMEWORKS if name != "torch"])
def found(request, tmp_path_factory):
    """What every job came to on each worker, from one start of the workers."""
    require(request.param)
    values = run(request.param, JOBS, tmp_path_factory.mktemp(request.param))
    for rank, value in enumerate(values):
        assert value is not None, f"worker {rank} is gone"
        assert "error" not in value, f"worker {rank}: {value['error']}"
    return values


def assert_same(found, name):
    for value in found:
        for weight, one in zip(
            value[name]["weights"], found[0]["alone", JOBS[name].kind, JOBS[name].faulty], strict=True
        ):
            np.testing.assert_allclose(weight, one, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_one_process(found, kind):
    assert_same(found, kind)


@pytest.mark.parametrize("odd", ODD)
def test_another_model_optimizer_or_dtype_on_one_worker_is_named(found, odd):
    for value in found:
        assert value[odd]["refused"].startswith("worker 1 has ")
        assert value[odd]["refused"].endswith(": start every worker with the same model and optimizer")


def test_a_gradient_that_is_not_finite_is_left_out_and_its_worker_named(found):
    assert_same(found, "not finite")
    none, [said], none_either = (value["not finite"]["warned"] for value in found)
    assert none == none_either == []
    assert said.startswith("worker 1 left out its gradient of iteration 4, which holds a NaN or an infinity;")
