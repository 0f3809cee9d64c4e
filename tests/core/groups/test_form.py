from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.core.errors import ConfigError
from evenstep.core.groups import by_host
from evenstep.core.groups.form import by_rank, each_by_speed, rate_of, require_partition

seconds = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("slowdown", "times"), [(4, (4.0, 1.6, 1.23, 1.10, 1.05)), (2, (2.0, 4 / 3, 1.14, 1.07, 1.03))]
)
def test_one_slow_worker_of_16_in_equal_groups_is_as_computed(slowdown, times):
    each = [float(slowdown)] + [1.0] * 15
    for count, time in zip((1, 2, 4, 8, 16), times, strict=True):
        assert 16 / rate_of(by_rank(range(16), count), each) == pytest.approx(time, abs=0.005)


def test_16_workers_in_five_groups_of_which_the_slow_one_is_in_a_large_or_a_small_one():
    groups = by_rank(range(16), 5)
    assert sorted(map(len, groups)) == [3, 3, 3, 3, 4]
    found = {round(16 / rate_of(groups, [4.0 if w == slow else 1.0 for w in range(16)]), 2) for slow in range(16)}
    assert found == {1.16, 1.23}


def test_the_slow_worker_alone_costs_its_own_work_only():
    each = [1.0] * 7 + [4.0] + [1.0] * 8
    groups = each_by_speed(each, 2)[-1]
    assert groups[1] == (7,)
    assert 16 / rate_of(groups, each) == pytest.approx(1.05, abs=0.005)


@given(seconds, st.integers(1, 8))
def test_groups_by_speed_do_the_most_that_so_many_can(each, count):
    groups = each_by_speed(each, count)[-1]
    require_partition(groups, len(each))
    assert len(groups) <= count
    order = sorted(each)
    most = max(
        sum((stop - start) / order[stop - 1] for start, stop in zip((0, *cuts), (*cuts, len(order)), strict=True))
        for number in range(min(count, len(order)))
        for cuts in combinations(range(1, len(order)), number)
    )
    assert rate_of(groups, each) == pytest.approx(most)


def test_equal_workers_are_one_group():
    assert each_by_speed([0.3] * 6, 4)[-1] == (tuple(range(6)),)


@given(st.lists(st.integers(0, 50), unique=True), st.integers(1, 60))
def test_groups_by_rank_hold_everyone_once_and_are_of_even_size(workers, count):
    groups = by_rank(workers, count)
    assert [worker for group in groups for worker in group] == sorted(workers)
    assert len(groups) == min(count, len(workers))
    assert not groups or max(map(len, groups)) - min(map(len, groups)) <= 1


def test_hosts_are_groups_in_the_order_of_their_first_workers():
    assert by_host(["b", "a", "b", "c", "a"]) == ((0, 2), (1, 4), (3,))


@pytest.mark.parametrize("groups", [((0, 1),), ((0, 1), (1, 2)), ((0, 1, 2), ()), ((0, 1, 2, 3),)])
def test_groups_that_leave_out_or_repeat_a_worker_are_refused(groups):
    with pytest.raises(ConfigError, match="each of the workers 0 to 2 once"):
        require_partition(groups, 3)
