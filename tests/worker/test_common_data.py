"""Workers compare a few samples, of which those that differ from one fetch to the next say nothing."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest

from evenstep.core.errors import ConfigError, DisagreementError
from evenstep.worker.common_data import require_common

ROWS = np.random.default_rng(0).normal(size=(60, 4))
KINDS = np.arange(60) % 7


def compared(*datas, partition=None):
    """What each worker is told, of which each has one of these functions from indices to arrays."""
    barrier, records = Barrier(len(datas)), [None] * len(datas)

    def worker(rank, batch_of):
        def exchange(record):
            records[rank] = record
            barrier.wait()
            found = list(records)
            barrier.wait()
            return found

        try:
            require_common(batch_of, 30, exchange, rank=rank, partition=partition)
        except DisagreementError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(len(datas)) as threads:
        return list(threads.map(worker, range(len(datas)), datas))


def all_of(indices):
    return [ROWS[indices], KINDS[indices]]


def others(indices):
    return [ROWS[indices + 30], KINDS[indices]]


def of_other_kinds(indices):
    return [ROWS[indices], KINDS[indices + 1]]


def texts(indices):
    return [np.array([f"text {each}" for each in indices])]


def other_texts(indices):
    return [np.array([f"another text {each}" for each in indices])]


def augmented(seed):
    generator = np.random.default_rng(seed)
    return lambda indices: [ROWS[indices] + generator.normal(size=(len(indices), 4))]


@pytest.mark.parametrize(
    "datas", [[all_of, all_of, all_of], [augmented(1), augmented(2)], [all_of, augmented(3)], [texts, other_texts]]
)
def test_data_that_are_the_same_or_cannot_be_compared_are_accepted(datas):
    assert compared(*datas) == [None] * len(datas)


@pytest.mark.parametrize(("datas", "odd"), [([all_of, others], 1), ([all_of, all_of, of_other_kinds], 2)])
def test_other_samples_are_named_on_every_worker(datas, odd):
    sentence = f"worker {odd} has other samples than worker 0, in a dataset of the same length: give all workers all of"
    assert all(said.startswith(sentence) for said in compared(*datas))
    assert compared(*datas, partition="common") == [None] * len(datas)


def test_another_partition_is_refused():
    with pytest.raises(ConfigError, match=r"^partition must be 'common' or None, not 'private'"):
        compared(all_of, partition="private")
