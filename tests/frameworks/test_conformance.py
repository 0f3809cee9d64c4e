"""The same promises in every framework: each row of the table trains as one process of its framework does."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from support.frameworks.start import run
from support.frameworks.table import FRAMEWORKS, require
from support.frameworks.task import EPOCHS, GLOBAL, SLICES, WORKERS, Job, averaged
from support.told_speeds import told

from evenstep.schemes import Scheme, static
from evenstep.testing.scripted import Scripted

pytestmark = [pytest.mark.multiprocess, pytest.mark.xdist_group("conformance")]

CHANGE, WITHIN = 13, 3
CHANGING = Scheme(name="scripted", load=Scripted(seed=11))
SCHEMES = {
    "sizes that always change": CHANGING,
    "sizes by hand": static([12, 9, 3]),
    "bsp": "bsp",
    "dbs": told("dbs", (1, 1, 3)),
    "lb-bsp": told("lb-bsp:change_cost=0", (1, 1, 3), then=(CHANGE, (3, 1, 1))),
    "averaged in every iteration": replace(CHANGING, name="local", period=1),
}
LOCAL, PERIOD = "averaged in every fourth iteration", 4
KILLED = 4


@pytest.fixture(scope="module", params=FRAMEWORKS)
def framework(request):
    require(request.param)
    return request.param


@pytest.fixture(scope="module")
def found(framework, tmp_path_factory):
    """What every job came to on each worker, from one start of the workers."""
    dtypes = FRAMEWORKS[framework].within
    schemes = SCHEMES | {LOCAL: replace(static([12, 9, 3]), name="local", period=PERIOD)}
    jobs = {(name, dtype): Job(scheme=scheme, dtype=dtype) for name, scheme in schemes.items() for dtype in dtypes}
    values = run(framework, jobs, tmp_path_factory.mktemp(framework))
    for rank, value in enumerate(values):
        assert value is not None, f"worker {rank} is gone"
        assert "error" not in value, f"worker {rank}: {value['error']}"
    return values


def every(found, name, dtype="float32"):
    return [value[name, dtype]["taken"] for value in found]


@pytest.mark.parametrize("name", SCHEMES)
def test_the_union_of_batches_is_the_slice_in_each_iteration_so_that_each_sample_counts_once(found, name):
    for iteration, parts in enumerate(zip(*every(found, name), strict=True)):
        union = sorted(index for indices, _ in parts for index in indices)
        assert union == SLICES[iteration % len(SLICES)].tolist()
    assert iteration + 1 == EPOCHS * len(SLICES) > 30


@pytest.mark.parametrize("name", SCHEMES)
def test_weights_are_those_of_one_process_of_the_framework(framework, found, name):
    for dtype, within in FRAMEWORKS[framework].within.items():
        expected = found[0]["alone", dtype, False]
        for value in found:
            for weight, one in zip(value[name, dtype]["weights"], expected, strict=True):
                assert weight.dtype == dtype
                np.testing.assert_allclose(weight, one, rtol=0, atol=within)


def test_weights_that_are_averaged_from_time_to_time_are_those_of_the_equations(framework, found):
    for dtype, within in FRAMEWORKS[framework].within.items():
        taken = [[indices for indices, _ in each] for each in every(found, LOCAL, dtype)]
        for value in found:
            for weight, one in zip(value[LOCAL, dtype]["weights"], averaged(taken, PERIOD), strict=True):
                # The equations are evaluated in float64.
                np.testing.assert_allclose(weight, one, rtol=0, atol=5 * within if dtype == "float32" else within)


@pytest.mark.parametrize("name", SCHEMES)
def test_all_workers_know_the_same_sizes(found, name):
    sizes = [[sizes for _, sizes in taken] for taken in every(found, name)]
    assert sizes[1:] == sizes[:1] * (WORKERS - 1)
    assert [len(indices) for indices, _ in every(found, name)[2]] == [each[2] for each in sizes[2]]


def test_sizes_change_in_all_iterations_of_the_first_scheme(found):
    sizes = [sizes for _, sizes in every(found, "sizes that always change")[0]]
    assert sum(one != other for one, other in pairwise(sizes)) > 20


def test_sizes_follow_a_change_of_speed_within_three_iterations(found):
    sizes = [sizes for _, sizes in every(found, "lb-bsp")[0]]
    fitting, opposite = sizes[CHANGE - 1], sizes[CHANGE + WITHIN]
    assert sum(fitting) == sum(opposite) == GLOBAL
    # 24 samples for speeds 3:3:1 and then 1:3:3 are 10.3, 10.3, 3.4 and the reverse; JAX has multiples of 4.
    for slow, *fast in (fitting[::-1], opposite):
        assert slow <= 4
        assert fast == pytest.approx([10, 10], abs=2)


def test_sizes_follow_the_speeds_of_the_epoch_before(found):
    sizes = [sizes for _, sizes in every(found, "dbs")[0]]
    assert sizes[0] == [8, 8, 8]
    assert sizes[len(SLICES)][0] == pytest.approx(3 * sizes[len(SLICES)][2], abs=2)


def test_a_killed_worker_is_named_on_the_survivors(framework, tmp_path):
    *survivors, last = run(framework, {"killed": Job(scheme="bsp", killed=KILLED)}, tmp_path)
    assert last is None
    for value in survivors:
        assert "WorkerLostError: worker 2 " in value["error"]  # TensorFlow puts words of its own before it.
