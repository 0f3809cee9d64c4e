"""The first period of a run, whose rest is divided by speed after its first steps."""

import numpy as np
import pytest

from evenstep.core.load.first_period import compares_first_steps, first_period_sizes
from evenstep.core.values import UNLIMITED, Problem
from evenstep.schemes import in_batches, parse_scheme

BATCH = 4
SCHEME = in_batches(parse_scheme("diloco:period=10,steps=speed"), BATCH)


def array(*values):
    return np.array(values, dtype=np.int64)


def problem_of(workers, period=10):
    return Problem(
        global_batch_size=workers * period * BATCH,
        minimum=np.full(workers, BATCH),
        maximum=np.full(workers, UNLIMITED),
        multiple=BATCH,
    )


@pytest.mark.parametrize(
    ("milliseconds", "taken", "steps"),
    [
        ((1, 1, 2, 4), (2, 2, 2, 2), [14, 13, 8, 5]),  # 32 are left, in proportion to 4:4:2:1.
        ((1, 1, 1, 500), (2, 2, 2, 2), [13, 12, 12, 3]),  # The slowest has at least one more.
        ((1, 1, 2, 4), (3, 2, 2, 9), [12, 11, 6, 11]),  # 24 are left: some had fetched more.
        ((1, 1, 2, 4), (2, 10, 2, 2), [10, 10, 10, 10]),  # One has fetched all.
        ((10, 10, 10, 11), (2, 2, 2, 2), [10, 10, 10, 10]),  # This may be noise.
        ((1, 1, 2, 0), (2, 2, 2, 2), [10, 10, 10, 10]),  # One did not compute the step.
    ],
)
def test_what_is_left_after_the_first_steps_is_divided_by_their_times(milliseconds, taken, steps):
    times = 1000 * array(*milliseconds)
    samples = np.where(times > 0, BATCH, 0)
    equal = np.full(4, 10 * BATCH)
    sizes = first_period_sizes(SCHEME.policy(4), problem_of(4), equal, BATCH * array(*taken), samples, times)
    assert (sizes // BATCH).tolist() == steps
    assert sizes.sum() == equal.sum()


def test_sizes_that_change_between_epochs_alone_stay():
    scheme, equal = in_batches(parse_scheme("diloco:period=10,steps=speed,load=dbs"), BATCH), array(40, 40)
    times, samples = array(1000, 4000), array(BATCH, BATCH)
    sizes = first_period_sizes(scheme.policy(2), problem_of(2), equal, 2 * samples, samples, times)
    assert sizes.tolist() == [40, 40]


def compares(*sizes, **more):
    problem = problem_of(len(sizes), sum(sizes) // len(sizes) // BATCH)
    return compares_first_steps(problem, array(*sizes), BATCH, **{"basis": "start", "met": False} | more)


@pytest.mark.parametrize(("sizes", "expected"), [((12, 12), True), ((8, 8), False), ((11, 11), False), ((24,), False)])
def test_times_are_compared_where_each_worker_has_steps_left_in_a_whole_period(sizes, expected):
    assert compares(*sizes) is expected


@pytest.mark.parametrize("more", [{"basis": "speed"}, {"met": True}])
def test_times_are_not_compared_where_speeds_are_known(more):
    assert not compares(12, 12, **more)
