"""Workers compare a few samples, and refuse datasets of equal length that differ."""

import random

import numpy as np
import pytest
import torch
from support import own_data
from support.processes import results, run_workers
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

import evenstep
from evenstep.core.sketch import unlike
from evenstep.torch.data.sketch import sketch_of

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
    """Opens what it reads at the first sample, counts its samples, and draws from everything that there is."""

    def __init__(self):
        self.file = None
        self.count = 0
        self.own = np.random.default_rng(0)
        self.older = np.random.RandomState(0)
        self.generator = torch.Generator().manual_seed(0)
        self.plain = random.Random(0)
        self.reader = Reader()

    def __len__(self):
        return 9

    def __getitem__(self, index):
        self.file = self.file or object()
        self.count += 1
        self.reader.read()
        drawn = [
            random.random(),
            np.random.random(),
            torch.rand(1).item(),
            self.own.random(),
            self.older.random_sample(),
        ]
        return torch.tensor([*drawn, self.plain.random(), torch.rand(1, generator=self.generator).item()])


class Reader:
    def __init__(self):
        self.file = None

    def read(self):
        self.file = self.file or object()


def wrapped():
    """Datasets around one that keeps what it opens."""
    return {
        "plain": lambda kept: kept,
        "subset": lambda kept: Subset(kept, [3, 4]),
        "concatenated": lambda kept: ConcatDataset([TensorDataset(torch.zeros(3, 7)), kept]),
    }


@pytest.mark.parametrize("name", list(wrapped()))
def test_nothing_of_the_dataset_changes(name):
    kept = Kept()
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    (loader, again) = (DataLoader(wrapped()[name](kept), num_workers=workers) for workers in (0, 1))
    assert sketch_of(loader) == sketch_of(again) != ()
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    assert (kept.file, kept.count, kept.reader.file) == (None, 0, None)
    assert kept.own.random() == np.random.default_rng(0).random()
    assert kept.older.random_sample() == np.random.RandomState(0).random_sample()
    assert torch.equal(
        torch.rand(1, generator=kept.generator), torch.rand(1, generator=torch.Generator().manual_seed(0))
    )
    assert kept.plain.random() == random.Random(0).random()


class Counting(Dataset):
    def __init__(self, length, sample):
        self.length, self.sample, self.fetched = length, sample, []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.fetched.append(index)
        return self.sample(index)


def sketch(sample, length=10):
    return sketch_of(DataLoader(Counting(length, sample), sampler=[0]))


@pytest.mark.parametrize(("length", "fetched"), [(1000, [0, 500, 999]), (2, [0, 1]), (1, [0])])
def test_at_most_three_samples_are_fetched(length, fetched):
    counting = Counting(length, float)
    sketch_of(DataLoader(counting, sampler=[0]))
    assert counting.fetched == fetched


def fail(index):
    raise KeyError(index)


@pytest.mark.parametrize(
    "sample",
    [fail, lambda i: object(), lambda i: None, lambda i: f"/data/{i}.jpg", lambda i: torch.eye(3).to_sparse()],
    ids=["error", "object", "none", "path", "sparse"],
)
def test_what_cannot_be_compared_is_not(sample):
    assert sketch(sample) == ()


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
        lambda i: np.full((2, 2), i, dtype=np.int16),
        lambda i: np.full((2, 2), i, dtype=np.float64)[::-1],
        lambda i: {"deep": [[{"x": np.float32(i)}]]},
        lambda i: torch.zeros(i),
    ],
)
def test_other_samples_have_another_sketch(sample):
    mine = sketch(sample)
    assert mine == sketch(sample)
    assert unlike([mine, sketch(lambda i: sample(i + 3))]) == 1


def test_of_shards_the_lengths_are_compared_and_none_is_read():
    def loader(lengths):
        return DataLoader(evenstep.ShardedDataset(["a", "b"], lengths, fail))

    assert unlike([sketch_of(loader([2, 3])), sketch_of(loader([2, 3]))]) is None
    assert unlike([sketch_of(loader([2, 3])), sketch_of(loader([3, 2]))]) == 1
