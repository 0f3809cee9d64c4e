"""What samples take on their way from a data worker, and that they arrive as they were."""

import pickle
import random
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import evenstep
from evenstep.torch.data.fetch import Requests, SeededDataset, inner_loader

ROWS, COLUMNS = 4096, 256  # 1 KB a sample, 4 MB in all
DATA = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)
ARRAY = DATA.numpy()
HALF = DATA.bfloat16()
COMPLEX = torch.view_as_complex(DATA.reshape(ROWS, -1, 2))
LEARNT = DATA.clone().requires_grad_()

Pair = namedtuple("Pair", "image label")


@dataclass
class Sample:
    image: torch.Tensor
    label: int


class Labelled(torch.Tensor):
    """A subclass with an attribute, like those of torchvision."""


def labelled(row):
    image = DATA[row].as_subclass(Labelled)
    image.caption = f"row {row}"
    return image


def sparse(row):
    places = torch.arange(128).reshape(1, -1)
    return torch.sparse_coo_tensor(places, DATA[row, :128], (COLUMNS,), check_invariants=True)


VIEWS = {
    "a tensor": lambda row: DATA[row],
    "a tuple": lambda row: (DATA[row], row),
    "a nested dictionary": lambda row: {"of": [{"image": DATA[row]}, "text"], "label": DATA[row, :1]},
    "a named tuple": lambda row: Pair(DATA[row], row),
    "an object": lambda row: Sample(DATA[row], row),
    "an array": lambda row: (ARRAY[row], ARRAY[row, ::2]),
    "a column": lambda row: DATA.T[row % COLUMNS, :256],
    "a transposed part": lambda row: DATA[row : row + 2, :128].T,
    "bfloat16": lambda row: HALF[row],
    "complex": lambda row: COMPLEX[row],
    "conjugated": lambda row: COMPLEX[row].conj(),
    "sparse": sparse,
    "a subclass": labelled,
    "one that is learnt": lambda row: LEARNT[row],
    "a number": lambda row: DATA[row, 0],
    "nothing": lambda row: DATA[row, :0],
}


def packed(samples):
    """As a data worker packs them for a `collate_fn` of the user's own."""
    source = DataLoader(range(1), batch_size=1, num_workers=1, collate_fn=list)
    return inner_loader(source, SeededDataset(source.dataset, 0), 0, Requests()).collate_fn(samples)


def same(one, other):
    if isinstance(one, torch.Tensor):
        assert (type(one), one.dtype, one.layout, one.requires_grad) == (
            *(type(other), other.dtype, other.layout, other.requires_grad),
        )
        assert vars(one) == vars(other)
        assert torch.equal(one.to_dense(), other.to_dense())
    elif isinstance(one, np.ndarray):
        np.testing.assert_array_equal(one, other, strict=True)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            same(one[name], other[name])
    elif isinstance(one, list | tuple):
        assert type(one) is type(other)
        for each, its in zip(one, other, strict=True):
            same(each, its)
    elif isinstance(one, Sample):
        same(vars(one), vars(other))
    else:
        assert one == other


@pytest.mark.parametrize("kind", VIEWS)
def test_a_view_of_a_large_tensor_travels_without_the_rest_of_it(kind):
    samples = [VIEWS[kind](row) for row in range(7, 39)]
    travels = packed(samples)
    assert len(travels) / len(samples) < 2 * COLUMNS * 4 + 1500
    same(pickle.loads(travels), samples)


def test_a_kilobyte_travels_with_less_than_a_hundred_bytes_beside_it():
    assert len(packed([DATA[row] for row in range(32)])) < 32 * (COLUMNS * 4 + 100)


def test_what_is_expanded_travels_as_small_as_it_is_stored():
    samples = [torch.full((1,), float(row)).expand(10**6) for row in range(4)]
    travels = packed(samples)
    assert len(travels) < 10_000
    same(pickle.loads(travels), samples)


class InMemory(Dataset):
    def __len__(self):
        return 50

    def __getitem__(self, index):
        return DATA[index], index


def sums(samples):
    images, labels = zip(*samples, strict=True)
    return torch.stack(images).sum(1).tolist(), list(labels)


def test_a_collate_function_gets_the_same_from_data_workers_as_in_this_process():
    seen = []
    for num_workers in (0, 2):
        model = torch.nn.Linear(1, 1)
        source = DataLoader(InMemory(), batch_size=8, shuffle=True, num_workers=num_workers, collate_fn=sums)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen.append(list(evenstep.prepare(model, optimizer, source)[2]))
    assert seen[0] == seen[1]
    assert sorted(label for _, labels in seen[0] for label in labels) == list(range(50))


class DrawsSometimes(InMemory):
    """Random augmentation of some samples, as flips with a probability; it counts how often samples are fetched."""

    def __init__(self, first):
        self.first, self.fetched = first, 0

    def __getitem__(self, index):
        self.fetched += 1
        return (torch.rand(()).item() + random.random() + np.random.random() if index >= self.first else 0.0), index


class InLists(InMemory):
    def __getitems__(self, indices):
        return [(DATA[index], -index) for index in indices]


def epoch_of(dataset, **options):
    model = torch.nn.Linear(1, 1)
    source = DataLoader(dataset, **{"batch_size": 8, "collate_fn": list, **options})
    _, _, loader = evenstep.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), source)
    return [sample for batch in loader for sample in batch]


def test_samples_are_seeded_alike_whichever_is_the_first_to_draw():
    always = {index: value for value, index in epoch_of(DrawsSometimes(0))}
    for first in (1, 20, 49):
        late = {index: value for value, index in epoch_of(DrawsSometimes(first))}
        assert {index: value for index, value in late.items() if value} == {n: always[n] for n in range(first, 50)}


def test_what_draws_nothing_is_fetched_once():
    dataset = DrawsSometimes(50)
    epoch_of(dataset)
    assert dataset.fetched == 50


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_dataset_that_fetches_lists_is_asked_for_lists(num_workers):
    assert sorted(index for _, index in epoch_of(InLists(), num_workers=num_workers)) == list(range(-49, 1))
