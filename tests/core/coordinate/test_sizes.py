import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.core.coordinate.sizes import Sizes
from evenstep.core.load import Equal, Experts, Static
from evenstep.core.values import UNLIMITED, Problem


def problem(workers=2, batch=8, minimum=1, maximum=UNLIMITED, multiple=1):
    limits = np.ones(workers, dtype=np.int64)
    return Problem(global_batch_size=batch, minimum=limits * minimum, maximum=limits * maximum, multiple=multiple)


def sizes_of(load, present=(0, 1), **limits):
    sizes = Sizes(load, problem(**limits))
    for worker in present:
        sizes.join(worker)
    return sizes


def row(nanoseconds=0, largest=UNLIMITED):
    return [1, nanoseconds, 0, largest]


LB_BSP = Experts(predictor="last", change_cost=0.0, warmup=0)


def test_those_that_are_there_share_the_batch():
    sizes = sizes_of(Equal(), present=(), workers=4, batch=12)
    assert sizes.all() == {}
    sizes.join(3)
    assert sizes.all() == {3: 12}
    sizes.join(0)
    sizes.join(1)
    assert sizes.all() == {0: 4, 1: 4, 3: 4}
    sizes.leave(0)
    assert sizes.all() == {1: 6, 3: 6}


def test_those_that_are_left_take_no_more_than_they_may():
    assert sizes_of(Equal(), present=(1,), workers=3, batch=12, maximum=5).all() == {1: 5}
    assert sizes_of(Equal(), present=(1, 2), workers=3, batch=12, maximum=5, multiple=2).all() == {1: 4, 2: 4}


def test_the_users_own_sizes_stay_with_their_ranks():
    load = Static(sizes=(2, 4, 6))
    assert sizes_of(load, present=(0, 1, 2), workers=3, batch=12).all() == {0: 2, 1: 4, 2: 6}
    assert sizes_of(load, present=(0, 2), workers=3, batch=12).all() == {0: 2, 2: 6}


def test_the_users_own_sizes_are_not_limited_by_what_is_reported():
    sizes = sizes_of(Static(sizes=(2, 6)))
    sizes.observe(0, row())
    sizes.observe(1, row(largest=5))
    assert sizes.all() == {0: 2, 1: 6}


def test_sizes_follow_reports_once_everyone_has_reported():
    sizes = sizes_of(LB_BSP)
    for _ in range(5):
        sizes.observe(0, row(3000))
    assert sizes.all() == {0: 4, 1: 4}
    sizes.observe(1, row(1000))
    assert sizes.all() == {0: 2, 1: 6}
    sizes.observe(7, row(1000))


def test_a_worker_that_joins_counts_as_the_median_until_it_has_reported():
    sizes = sizes_of(LB_BSP, workers=3, batch=12)
    sizes.observe(0, row(3000))
    sizes.observe(1, row(1000))
    assert sizes.all() == {0: 3, 1: 9}
    sizes.join(2)
    sizes.observe(0, row(3000))
    assert sizes.all() == {0: 2, 1: 7, 2: 3}
    sizes.observe(1, row(1000))
    sizes.observe(2, row(1500))
    assert sizes.all() == {0: 2, 1: 6, 2: 4}
    sizes.leave(1)
    assert sizes.all() == {0: 4, 2: 8}


def test_a_worker_that_leaves_and_is_back_before_anyone_asks_changes_nothing():
    sizes = sizes_of(LB_BSP)
    sizes.observe(0, row(3000))
    sizes.observe(1, row(1000))
    sizes.leave(1)
    sizes.join(1)
    assert sizes.all() == {0: 2, 1: 6}


def test_sizes_stay_within_the_memory_that_is_reported():
    sizes = sizes_of(LB_BSP)
    sizes.observe(0, row(3000))
    sizes.observe(1, row(1000, largest=5))
    assert sizes.all() == {0: 3, 1: 5}


def test_memory_that_holds_no_multiple_counts_as_one():
    sizes = sizes_of(Equal(), multiple=2)
    sizes.observe(0, row(largest=1))
    sizes.observe(1, row(largest=8))
    assert sizes.all() == {0: 2, 1: 6}


def test_a_snapshot_of_limits_counts_at_once_and_one_of_speeds_when_the_same_workers_are_back():
    sizes = sizes_of(LB_BSP, workers=3)
    sizes.begin_epoch(4)
    sizes.observe(0, row(3000, largest=6))
    sizes.observe(1, row(1000, largest=5))
    assert sizes.all() == {0: 3, 1: 5}
    state = json.loads(json.dumps(sizes.state_dict()))
    again = sizes_of(LB_BSP, present=(), workers=3)
    again.load_state_dict(state)
    for worker, known in ((1, {1: 5}), (2, {1: 4, 2: 4}), (0, {0: 3, 1: 3, 2: 2})):
        again.join(worker)
        assert again.all() == known
    again.leave(2)
    assert again.all() == {0: 3, 1: 5}
    assert again.state_dict() == sizes.state_dict()
    at_once = sizes_of(LB_BSP, workers=3)
    at_once.all()
    at_once.load_state_dict(state)
    assert at_once.all() == {0: 3, 1: 5}


def test_claims_shrink_towards_the_end_but_not_below_a_quarter():
    sizes = sizes_of(Equal(), batch=32)
    assert [sizes.next_of(0, unclaimed) for unclaimed in (100, 32, 31, 16, 8, 5, 3)] == [16, 16, 16, 8, 4, 4, 3]


def test_in_step_the_last_slice_is_shared_by_those_that_take_it():
    sizes = sizes_of(Equal(), workers=3, present=(0, 1, 2), batch=12)
    assert sizes.slice_of((0, 1, 2), 100) == {0: 4, 1: 4, 2: 4}
    assert sizes.slice_of((0, 1, 2), 5) == {0: 2, 1: 2, 2: 1}
    assert sizes.slice_of((0, 2), 7) == {0: 4, 2: 3}
    assert sizes_of(Equal(), batch=12, minimum=2).slice_of((0, 1), 3) == {0: 3, 1: 0}


@given(data=st.data(), minimum=st.integers(1, 3), length=st.integers(1, 60), workers=st.integers(1, 4))
def test_nobody_is_left_with_less_than_can_be_computed_on_where_that_can_be_helped(data, minimum, length, workers):
    maximum = data.draw(st.sampled_from([minimum, 2 * minimum - 1, 2 * minimum, 3 * minimum + 1, UNLIMITED]))
    batch = data.draw(st.integers(minimum * workers, min(5 * minimum, maximum) * workers))
    sizes = sizes_of(Equal(), range(workers), workers=workers, batch=batch, minimum=minimum, maximum=maximum)
    unclaimed, taken = length, []
    while unclaimed:
        size = sizes.next_of(data.draw(st.integers(0, workers - 1)), unclaimed)
        assert 1 <= size <= min(maximum, unclaimed)
        taken.append(size)
        unclaimed -= size
    if length >= minimum and maximum >= 2 * minimum - 1:
        assert min(taken) >= minimum
    assert all(size >= minimum for size in taken[:-1])


@pytest.mark.parametrize(("planned", "unclaimed", "next_size"), [(8, 9, 7), (8, 8, 8), (2, 3, 3), (4, 5, 3)])
def test_with_a_minimum_of_two_no_single_sample_is_left(planned, unclaimed, next_size):
    assert sizes_of(Equal(), (0,), workers=1, batch=planned, minimum=2).next_of(0, unclaimed) == next_size
