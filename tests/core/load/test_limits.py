"""What each worker may have; `tests/core/coordinate/test_size_limits.py` has workers that come and go."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.core.errors import ConfigError
from evenstep.core.load import Equal, Static
from evenstep.core.load.limits import SizeLimits, smallest_batch
from evenstep.core.values import UNLIMITED, Problem


def problem(batch, maximum, multiple=1):
    maximum = np.array(maximum)
    return Problem(global_batch_size=batch, minimum=np.ones_like(maximum), maximum=maximum, multiple=multiple)


@given(data=st.data(), multiple=st.sampled_from([1, 1, 3]), workers=st.integers(1, 5))
def test_all_workers_have_the_global_batch_within_their_limits_where_these_leave_room(data, multiple, workers):
    batch = multiple * data.draw(st.integers(workers, 100))
    whole = problem(batch, [UNLIMITED] * workers, multiple)
    limits = SizeLimits(Equal(), whole)
    limits.report_all(np.array(data.draw(st.lists(st.integers(0, 200), min_size=workers, max_size=workers))))
    stretched = limits.stretched(whole)
    sizes = Equal().policy(workers).allocate(stretched).sizes
    assert sizes.sum() == batch
    if limits.room(range(workers)) >= batch:
        assert all(sizes <= [limits.of(worker) for worker in range(workers)])


def test_limits_that_leave_no_room_are_exceeded_in_proportion():
    whole = problem(96, [UNLIMITED] * 3)
    limits = SizeLimits(Equal(), whole)
    assert limits.report_all(np.array([24, 12, 12]))
    assert limits.stretched(whole).maximum.tolist() == [48, 24, 24]
    assert limits.report_all(np.array([60, 12, 24]))
    assert limits.stretched(whole).maximum.tolist() == [60, 12, 24]
    assert not limits.report_all(np.array([60, 12, 24]))


def test_what_is_known_beforehand_is_never_exceeded():
    known = problem(96, [40, 60])
    limits = SizeLimits(Equal(), known)
    limits.report_all(np.array([10, 10]))
    assert limits.stretched(known).maximum.tolist() == [40, 56]
    limits.report_all(np.array([UNLIMITED, UNLIMITED]))
    assert limits.stretched(known).maximum.tolist() == [40, 60]
    with pytest.raises(ConfigError, match="at most 100 samples together"):
        limits.stretched(problem(101, [40, 60]))


def test_what_a_run_begins_with_counts_until_the_workers_report():
    begun = problem(96, [50, UNLIMITED])
    limits = SizeLimits(Equal(), begun, np.array([90, UNLIMITED]))
    assert [limits.of(worker) for worker in (0, 1)] == [50, UNLIMITED]
    limits.load_state_dict({"largest": [80, 70]})
    assert [limits.of(worker) for worker in (0, 1)] == [50, 70]
    limits.report(0, 95)
    assert limits.of(0) == 90


def test_the_users_own_sizes_are_kept_whatever_is_reported():
    whole = problem(96, [UNLIMITED] * 2)
    limits = SizeLimits(Static(sizes=(60, 36)), whole)
    assert not limits.report_all(np.array([10, 10]))
    assert limits.stretched(whole).maximum.tolist() == [UNLIMITED] * 2


@pytest.mark.parametrize(
    ("load", "batch", "most", "needed", "smallest"),
    [
        (Equal(), 6, UNLIMITED, 1, 2),
        (Equal(), 5, UNLIMITED, 1, 1),
        (Equal(), 5, UNLIMITED, 2, 2),
        (Equal(), 60, 1, 1, 1),
        (Equal(minimum=1), 60, UNLIMITED, 2, 1),
        (Equal(minimum=4), 60, UNLIMITED, 1, 4),
        (Static(sizes=(1, 4, 5)), 10, UNLIMITED, 1, 1),
        (Static(sizes=(2, 4, 5)), 11, UNLIMITED, 1, 2),
    ],
)
def test_the_smallest_batch_is_two_where_every_worker_can_have_two(load, batch, most, needed, smallest):
    assert smallest_batch(load, batch, np.full(3, most), needed=needed) == smallest
    assert smallest_batch(Equal(), 60, np.array([UNLIMITED])) == 1
