"""What is fetched ahead, and that a batch is that of its indices alone, however sizes change."""

import threading

import numpy as np
import pytest
from support.guard import GUARD_SECONDS

from evenstep.worker.api.ahead import Ahead, in_thread

ROWS = np.arange(40.0).reshape(20, 2)


class Data:
    """Rows, or words that are padded to the longest of their batch; it notes what it was asked for."""

    def __init__(self, padded=False):
        self.padded, self.asked = padded, []

    def __getitem__(self, indices):
        self.asked.append(indices.tolist())
        return [np.ones((len(indices), indices.max() + 1)) if self.padded else ROWS[indices], indices]


def ahead_of(data, ahead=True):
    """Fetches when it is told of the next batch, in this thread."""

    def begin(indices):
        batch = data[indices]
        return lambda: batch

    return Ahead(data.__getitem__, begin if ahead else None, leaves=list, build=lambda like, leaves: list(leaves))


def taken(ahead, *shares):
    """The batches of shares, of which each is planned as the one before it says."""
    for indices, planned in shares:
        batch = ahead.batch(np.array(indices))
        ahead.plan(None if planned is None else np.array(planned))
        yield batch


def assert_of_their_indices(batches, shares, data):
    for batch, (indices, _) in zip(batches, shares, strict=True):
        for leaf, same in zip(batch, Data(data.padded)[np.array(indices)], strict=True):
            np.testing.assert_array_equal(leaf, same)
            assert leaf.dtype == same.dtype


@pytest.mark.parametrize(
    ("shares", "asked"),
    [
        ([([0, 1], [4, 5]), ([4, 5], None)], [[0, 1], [4, 5]]),
        ([([0, 1], [4, 5]), ([4, 5, 8, 9], None)], [[0, 1], [4, 5], [8, 9]]),
        ([([0, 1], [5, 4]), ([4], [6, 7]), ([6, 7], None)], [[0, 1], [5, 4], [6, 7]]),
        ([([0, 1], [4, 5, 5]), ([3, 5, 4, 4], None)], [[0, 1], [4, 5, 5], [3]]),
        ([([0], None), ([1], None)], [[0], [1]]),
    ],
)
def test_what_a_change_of_sizes_leaves_is_kept_and_the_rest_is_fetched(shares, asked):
    data = Data()
    assert_of_their_indices(taken(ahead_of(data), *shares), shares, data)
    assert data.asked == asked


def test_batches_that_are_padded_are_not_joined_nor_fetched_ahead_before_sizes_keep():
    data = Data(padded=True)
    shares = [([0, 9], [4, 5]), ([4, 5], [6, 7]), ([6, 7, 8], [10]), ([10], [12]), ([12], None)]
    assert_of_their_indices(taken(ahead_of(data), *shares), shares, data)
    assert data.asked == [[0, 9], [4, 5], [6, 7], [6, 7, 8], [10], [12]]


def test_nothing_is_fetched_ahead_without_leave():
    data, shares = Data(), [([0, 1], [4, 5]), ([4, 5], None)]
    batches = taken(ahead_of(data, ahead=False), *shares)
    next(batches)
    assert data.asked == [[0, 1]]
    next(batches)
    assert data.asked == [[0, 1], [4, 5]]


def test_a_thread_fetches_while_the_script_computes_and_its_error_is_raised_for_the_batch():
    fetching, computed = threading.Event(), threading.Event()

    def fetch(indices):
        if len(indices) > 1:
            fetching.set()
            assert computed.wait(GUARD_SECONDS)
            raise OSError("no such file")
        return [ROWS[indices]]

    ahead = Ahead(fetch, in_thread(fetch), leaves=list, build=lambda like, leaves: leaves)
    ahead.batch(np.array([0]))
    ahead.plan(np.array([1, 2]))
    assert fetching.wait(GUARD_SECONDS)
    computed.set()
    with pytest.raises(OSError, match="no such file"):
        ahead.batch(np.array([1, 2]))
