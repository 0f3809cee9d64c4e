"""Whatever a script's loader brings: over all workers, each of an epoch's samples is used once, at any sizes."""

import pickle

import pytest
import torch
from support import data_habits
from support.processes import results, run_workers
from torch.utils.data import DataLoader

import evenstep
from evenstep import ConfigError

pytestmark = pytest.mark.xdist_group("data_habits")

EPOCHS = 2
NAMES = list(data_habits.loaders())


@pytest.fixture(scope="module")
def visited():
    """What three workers were given of every loader, from one start."""
    return results(run_workers(data_habits.visit, 3, EPOCHS))


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", NAMES)
def test_each_sample_once(visited, name):
    _, held = data_habits.loaders()[name]
    workers = [value[name] for value in visited]
    assert len({len(iterations) for worker in workers for iterations in worker}) == 1
    for epoch in range(EPOCHS):
        numbers = [number for worker in workers for iteration in worker[epoch] for number in iteration]
        assert sorted(numbers) == list(held)


def numbers(loader, seed=0):
    model = torch.nn.Linear(1, 1)
    loader = evenstep.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, seed=seed)[2]
    return [batch.flatten().tolist() for batch in loader]


def test_the_order_is_that_of_the_loaders_generator():
    def order(seed, generator):
        loader = DataLoader(data_habits.Numbers(10), batch_size=4, shuffle=True, generator=generator)
        return numbers(loader, seed)

    assert order(0, data_habits.seeded()) == order(1, data_habits.seeded()) == order(5, None)
    assert order(0, data_habits.seeded()) != order(0, torch.Generator().manual_seed(6))


def test_shards_are_shuffled_whole_and_read_once_an_epoch():
    opened = []

    def read(shard):
        opened.append(shard)
        return range(shard * 10, shard * 10 + 10)

    dataset = evenstep.ShardedDataset(range(5), [10] * 5, read, transform=data_habits.as_tensor, keep=1)
    order = [number for batch in numbers(DataLoader(dataset, batch_size=10, shuffle=True)) for number in batch]
    assert sorted(order) == list(range(50))
    assert opened == [order[start] // 10 for start in range(0, 50, 10)]
    assert opened != sorted(opened)
    assert order[:10] != sorted(order[:10])
    assert dataset[49].item() == 49
    assert pickle.loads(pickle.dumps(data_habits.sharded()))[0].item() == 0


def test_shards_that_are_not_as_they_are_said_to_be():
    with pytest.raises(ConfigError, match="2 shards but 1 lengths"):
        evenstep.ShardedDataset([0, 1], [3], range)
    with pytest.raises(ConfigError, match="lengths of at least 0"):
        evenstep.ShardedDataset([0], [-1], range)
    with pytest.raises(ConfigError, match="shard 4 has 4 samples where its length says 3"):
        evenstep.ShardedDataset([4], [3], range)[0]
    with pytest.raises(IndexError):
        evenstep.ShardedDataset([4], [4], range)[4]
