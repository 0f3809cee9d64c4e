"""What samples take on their way from a data worker, and that they arrive as they were."""

import pickle
import random
from collections import deque, namedtuple
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

import evenstep
from evenstep.core.samples import Request
from evenstep.torch.data.batch_maker import BatchMaker
from evenstep.torch.data.fetch import ProcessFetcher, Requests, WorkerDataset
from evenstep.torch.data.packing import ByValue, pack
from evenstep.torch.data.randomness import seeded_randomness

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
    travels = pack(samples)
    assert len(travels) / len(samples) < 2 * COLUMNS * 4 + 1500
    same(pickle.loads(travels), samples)


def test_a_kilobyte_travels_with_less_than_a_hundred_bytes_beside_it():
    assert len(pack([DATA[row] for row in range(32)])) < 32 * (COLUMNS * 4 + 100)


def test_what_is_expanded_travels_as_small_as_it_is_stored():
    samples = [torch.full((1,), float(row)).expand(10**6) for row in range(4)]
    travels = pack(samples)
    assert len(travels) < 10_000
    same(pickle.loads(travels), samples)


BY_VALUE = [
    "a tensor",
    "a tuple",
    "a nested dictionary",
    "a named tuple",
    "an object",
    "a column",
    "complex",
    "nothing",
]


@pytest.mark.parametrize("kind", BY_VALUE)
def test_a_small_batch_travels_by_value_and_arrives_as_it_was(kind):
    """In the bytes that a queue between processes would write, without a file descriptor for each tensor."""
    batch = [VIEWS[kind](row) for row in range(7, 39)]
    travels = bytes(ForkingPickler.dumps(ByValue(batch)))
    assert b"rebuild" not in travels
    assert len(travels) / len(batch) < 2 * COLUMNS * 4 + 1500
    same(pickle.loads(travels), batch)


def test_what_default_collate_makes_is_made_and_its_extensions_count(monkeypatch):
    rows = [(DATA[n], n, 0.5 * n, n > 3, ARRAY[n], f"row {n}", {"sum": 2**40 + n}) for n in range(9)]
    for samples in (rows, [1, 2.5], [1, True], [1, np.int64(3)], [HALF[1], HALF[2]], [*DATA[:3]]):
        same(BatchMaker(samples).batch(list(range(len(samples)))), default_collate(samples))
    nested = [{"pair": (n, [DATA[n], {"row": ARRAY[n]}])} for n in range(4)]
    same(BatchMaker(nested).batch([0, 1, 2, 3]), default_collate(nested))
    with pytest.raises(RuntimeError, match="equal size"):
        BatchMaker([(1, 2), (3,)]).batch([0, 1])
    monkeypatch.setitem(default_collate_fn_map, int, lambda batch, **_: sum(batch))
    assert BatchMaker([1, 2]).batch([0, 1]) == 3
    monkeypatch.setitem(default_collate_fn_map, Mapping, lambda batch, **_: len(batch))
    assert BatchMaker(nested).batch([0, 1]) == 2


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


class Drawing(InMemory):
    """Random augmentation; it counts how often samples are fetched."""

    def __init__(self):
        self.fetched = 0

    def __getitem__(self, index):
        self.fetched += 1
        return tuple(moving()), index


class InLists(InMemory):
    def __getitems__(self, indices):
        return [(DATA[index], -index) for index in indices]


def loader_of(dataset, **options):
    model = torch.nn.Linear(1, 1)
    source = DataLoader(dataset, **{"batch_size": 8, "collate_fn": list, **options})
    return evenstep.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), source)[2]


def epoch(loader):
    return [sample for batch in loader for sample in batch]


DRAWS = [random.random, random.gauss, np.random.random, np.random.randn, lambda: torch.rand(()).item(),
         lambda: torch.randn(()).item()]  # fmt: skip


def moving():
    """What each global generator draws next."""
    return [draw() for draw in DRAWS]


def seeded_everywhere(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def test_a_sample_is_fetched_once():
    dataset = Drawing()
    assert len(epoch(loader_of(dataset))) == dataset.fetched == 50


def test_without_data_workers_the_dataset_draws_from_the_scripts_generators():
    seeded_everywhere(5)
    expected = [tuple(moving()) for _ in range(50)]
    loader = loader_of(Drawing(), collate_fn=list)
    assert loader.batch_sizes == [8]  # Starts the session, which draws nothing of the script's.
    seeded_everywhere(5)
    assert [drawn for drawn, _ in epoch(loader)] == expected


@pytest.mark.parametrize("masks", [False, True])
def test_data_workers_are_seeded_for_each_epoch_and_leave_the_scripts_generators_alone(masks):
    """Whether the samples draw, or the collate function, as that of masked language models does."""
    options = {"num_workers": 2, "collate_fn": masked if masks else list}
    seeded_everywhere(5)
    expected = moving()
    loaders = [loader_of(Drawing(), **options) for _ in range(2)]
    seeded_everywhere(5)
    first, again = (sorted(epoch(loader)) for loader in loaders)
    assert moving() == expected
    assert first == again
    loaders[0].set_epoch(1)
    second = epoch(loaders[0])
    assert len({drawn for drawn, *_ in (*first, *second)}) == len(first) + len(second)
    loaders[1].set_epoch(0)
    assert sorted(epoch(loaders[1])) == first


def masked(samples):
    """A collate function that draws."""
    return [(tuple(moving()), [index for _, index in samples])]


def test_all_generators_are_seeded_for_a_while():
    seeded_everywhere(5)
    expected = [moving() for _ in range(3)]
    seeded_everywhere(5)
    found, inside = [moving()], []
    for key in ((1, 2), (1, 2), (1, 3), (-1, 2**63 - 1)):
        with seeded_randomness(*key):
            inside.append(moving())
    assert [*found, moving(), moving()] == expected  # Also where a second Gaussian number is kept back.
    assert inside[0] == inside[1]
    assert len({number for drawn in inside for number in drawn}) == 3 * len(DRAWS)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_dataset_that_fetches_lists_is_asked_for_lists(num_workers):
    assert sorted(index for _, index in epoch(loader_of(InLists(), num_workers=num_workers))) == list(range(-49, 1))


class AsOne(InMemory):
    def __getitems__(self, indices):
        return {"image": DATA[indices], "labels": torch.tensor(indices)}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_dataset_may_fetch_a_batch_as_one(num_workers):
    loader = loader_of(AsOne(), num_workers=num_workers, collate_fn=lambda batch: batch)
    assert [label for batch in loader for label in batch["labels"].tolist()] == list(range(50))


def test_samples_that_are_needed_one_by_one_must_come_in_a_list():
    maker = BatchMaker(AsOne(), list)
    with pytest.raises(evenstep.ConfigError, match=r"__getitems__ returned .* return a list of samples"):
        maker.packed([0, 1])


class Shares:
    """Shares whose sizes change after each request: the first two requests are of what is not handed out."""

    def __init__(self, *requests):
        self.requests = deque(requests)

    def request(self, limit, *, whole=False):
        return self.requests.popleft() if self.requests else None


class Inner:
    """Data workers that are this process."""

    def __init__(self, requests, maker):
        self.requests, self.dataset = requests, WorkerDataset(maker)

    def __iter__(self):
        return (pickle.loads(ForkingPickler.dumps(self.dataset.__getitems__(task))) for task in self.requests)


def fetcher_of(maker, *requests):
    asked = Requests()
    asked.begin(Shares(*requests), np.arange(50), limit=None, by_rows=maker.by_rows)
    return ProcessFetcher(Inner(asked, maker), asked, maker, pin=False)


@pytest.mark.parametrize("collate", [default_collate, sums], ids=["default", "own"])
def test_what_a_change_of_sizes_leaves_is_the_same_batch(collate):
    """Whether it came whole, from a whole that was asked for anew, or from parts of two chunks."""
    maker = BatchMaker(InMemory(), collate)
    expected = maker.batch([3, 4, 5, 6])
    own = collate is not default_collate
    whole = Request(iteration=0, positions=(3, 4, 5, 6), whole=own)
    larger = Request(iteration=0, positions=(2, 3, 4, 5, 6, 7), whole=own)
    parts = Request(iteration=0, positions=(3, 5)), Request(iteration=0, positions=(4, 6))
    for requests in ((whole,), (larger, *parts), parts, (larger, whole)):
        found = fetcher_of(maker, *requests).fetch(0, (3, 4, 5, 6))
        assert str(found) == str(expected)


def test_a_chunk_that_is_the_batch_is_not_copied():
    maker = BatchMaker(InMemory())
    requests = [Request(iteration=0, positions=(0, 1)), Request(iteration=1, positions=(2, 3))]
    fetcher = fetcher_of(maker, *requests)
    sent = []
    fetcher._chunks = (sent.append(chunk) or chunk for chunk in fetcher._chunks)
    assert all(fetcher.fetch(n, request.positions) is sent[n] for n, request in enumerate(requests))
