"""Workers compare a checksum of a few samples, and refuse datasets of equal length that differ."""

import itertools
import multiprocessing
import random

import numpy as np
import pytest
import torch
from support import own_data
from support.processes import results, run_workers
from torch.utils.data import DataLoader, Dataset

import evenstep
from evenstep.torch.data.common_data import checksum_of

CASES = [("own", None), ("own", "common"), ("common", None), ("noisy", None), ("augmented", None), ("own", None, "asp")]


@pytest.mark.multiprocess
def test_datasets_that_differ_are_refused_in_one_sentence():
    told = results(run_workers(own_data.start_all, 3, CASES[:5]))
    assert told == [told[0]] * 3
    own, trusted, common, noisy, augmented = told[0]
    assert own.startswith("worker 1 has other samples than worker 0, in a dataset of the same length: give all workers")
    assert 'partition="private"' in own
    assert "\n" not in own
    assert (trusted, common, noisy, augmented) == (None, None, None, None)


@pytest.mark.multiprocess
def test_a_further_loader_is_compared_too():
    assert all("other samples" in told for told in results(run_workers(own_data.start_with_second_loader, 2)))


class Kept(Dataset):
    """Opens what it reads at the first sample, and draws from its own generator and from the global ones."""

    def __init__(self):
        self.reader = Reader()
        self.own = np.random.default_rng(0)

    def __len__(self):
        return 9

    def __getitem__(self, index):
        self.reader.read()
        return torch.tensor([random.random(), np.random.random(), torch.rand(1).item(), self.own.random()])


class Reader:
    def __init__(self):
        self.file = None

    def read(self):
        self.file = self.file or object()


def test_the_scripts_random_numbers_do_not_change_nor_matter():
    found = set()
    for seed, num_workers in itertools.product(range(2), (0, 2)):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        found.add(checksum_of(DataLoader(Kept(), num_workers=num_workers)))
        assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    assert len(found - {0}) == len(found) == 1


@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_nothing_of_a_dataset_for_data_workers_changes(method):
    """They must not inherit what it opens, such as a file."""
    kept = Kept()
    expected = checksum_of(DataLoader(Kept()))
    assert checksum_of(DataLoader(kept, num_workers=2, multiprocessing_context=method)) == expected
    assert kept.reader.file is None
    assert kept.own.random() == np.random.default_rng(0).random()


class Counting(Dataset):
    def __init__(self, length, sample):
        self.length, self.sample, self.fetched = length, sample, []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.fetched.append(index)
        return self.sample(index)


def checksum(sample, length=10):
    return checksum_of(DataLoader(Counting(length, sample), sampler=[0]))


@pytest.mark.parametrize(("length", "fetched"), [(1000, [0, 500, 999]), (2, [0, 1]), (1, [0])])
def test_at_most_three_samples_are_fetched(length, fetched):
    counting = Counting(length, float)
    checksum_of(DataLoader(counting, sampler=[0]))
    assert counting.fetched == fetched


def fail(index):
    raise KeyError(index)


@pytest.mark.parametrize(
    "sample",
    [fail, lambda i: object(), lambda i: None, lambda i: f"/data/{i}.jpg", lambda i: torch.eye(3).to_sparse()],
    ids=["error", "object", "none", "path", "sparse"],
)
def test_what_cannot_be_compared_is_not(sample):
    assert checksum(sample) == 0


@pytest.mark.parametrize(
    "sample",
    [
        float,
        int,
        str,
        lambda i: [i, i + 1],
        lambda i: {"text": f"sample {i}", "path": "/data", "object": object()},
        lambda i: (torch.full((4, 4), float(i)), "same"),
        lambda i: torch.full((4,), i, dtype=torch.bfloat16),
        lambda i: torch.full((4,), i, dtype=torch.uint8),
        lambda i: torch.full((4,), i + 0.5j),
        lambda i: torch.full((4,), i + 0.5j).conj(),
        lambda i: torch.tensor(i > 5),
        lambda i: np.full((2, 2), i, dtype=np.int16),
        lambda i: np.full((2, 2), i, dtype=np.float64)[::-1],
        lambda i: {"deep": [[{"x": np.float32(i)}]]},
        lambda i: torch.zeros(i),
    ],
)
def test_other_samples_have_another_checksum(sample):
    mine = checksum(sample)
    assert mine == checksum(sample)
    assert mine != checksum(lambda i: sample(i + 3))


def test_of_shards_the_lengths_are_compared_and_none_is_read():
    def loader(lengths):
        return DataLoader(evenstep.ShardedDataset(["a", "b"], lengths, fail))

    assert checksum_of(loader([2, 3])) == checksum_of(loader([2, 3])) != checksum_of(loader([3, 2]))
