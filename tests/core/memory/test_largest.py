"""The search for the largest batches tries nothing that does not fit, and ends at what fits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.core.memory import LargestBatches, MemoryModel
from evenstep.core.values import UNLIMITED, Reports


def searched(capacities, *, fixed=100, each=10, most=4096, microseconds=(10, 10), smallest=2, lag=0):
    """The search on devices of these bytes, of which a sample takes `each`; what was tried, and how many iterations."""
    count = len(capacities)
    models = [MemoryModel(capacity_bytes=each, base_bytes=fixed, rounding_bytes=0) for each in capacities]
    search, tried, reported = LargestBatches(smallest, np.full(count, most)), [], [np.zeros(count, dtype=int)] * lag
    while not search.done:
        sizes = search.sizes
        tried.append(sizes.tolist())
        for model, size, capacity in zip(models, sizes.tolist(), capacities, strict=True):
            assert fixed + each * size <= capacity
            model.observe(size, fixed + each * size)
        reported.append(sizes)
        timed = reported[-1 - lag]
        nothing = np.zeros(count, dtype=np.int64)
        search.observe(
            sizes,
            Reports(
                samples=timed,
                compute_microseconds=timed * np.resize(microseconds, count),
                forecast=nothing,
                largest_size=np.array([model.largest_size() for model in models]),
            ),
        )
    return search, tried


@pytest.mark.parametrize("lag", [0, 1])
def test_each_worker_ends_at_what_it_holds(lag):
    search, tried = searched([24_100, 12_100], microseconds=(10, 20), lag=lag)
    # 5 % stay free; less than a 32nd is not worth a further size.
    fits = np.array([0.95 * 24_100 - 100, 0.95 * 12_100 - 100]) / 10
    assert (search.holds <= fits).all()
    assert (search.holds >= fits * 31 / 32 - 1).all()
    assert search.more == [False, False]
    assert search.speeds == pytest.approx([100_000, 50_000])
    assert len(tried) < 60
    assert tried[-1] == search.holds.tolist()


@given(st.lists(st.integers(200, 10**6), min_size=1, max_size=5), st.integers(0, 2**32 - 1))
def test_whatever_the_memories_nothing_is_tried_that_does_not_fit(capacities, seed):
    times = np.random.default_rng(seed).integers(1, 100, len(capacities))
    search, tried = searched(capacities, microseconds=times)
    seconds = search.holds / np.array(search.speeds)
    # What each does in the time in which the first is full.
    assert search.global_batch_size == pytest.approx(sum(seconds.min() * np.array(search.speeds)), abs=len(capacities))
    assert search.global_batch_size <= search.holds.sum()
    assert max(max(sizes) for sizes in tried) <= 4096


def test_what_was_not_tried_is_told():
    search, _ = searched([10**9], most=64, microseconds=(1,))
    assert (search.holds.tolist(), search.more) == ([64], [True])
    # An iteration of twice the samples would take more than 30 s.
    search, _ = searched([10**9], microseconds=(1_000_000,))
    assert (search.holds.tolist(), search.more) == ([16], [True])
    assert LargestBatches(8, np.array([UNLIMITED, 4])).sizes.tolist() == [8, 4]


def test_times_rise_with_sizes_since_other_work_only_adds_to_them():
    search = LargestBatches(2, np.array([4]))
    unlimited, nothing = np.array([UNLIMITED]), np.zeros(1, dtype=np.int64)
    for samples, microseconds in ((2, 900), (2, 400), (4, 300), (4, 350)):
        search.observe(np.array([samples]), Reports(np.array([samples]), np.array([microseconds]), nothing, unlimited))
    assert search.points == [[(2, 0.0003), (4, 0.0003)]]


def test_a_global_batch_is_shared_in_proportion_to_speed_as_far_as_it_fits():
    search, _ = searched([24_100, 12_100], microseconds=(10, 20))
    assert search.shared(90).tolist() == [60, 30]
    assert search.shared(10**6).tolist() == search.holds.tolist()
