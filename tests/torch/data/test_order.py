"""The order of an epoch against torch's own DistributedSampler, which deals its samples out in turn."""

import itertools
import random

import numpy as np
import pytest
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from evenstep.torch.data.order import order_of
from evenstep.torch.processes.workers import Workers


def dealt(length, workers, epoch, **options):
    """The samples of all workers of plain DDP, in the order in which their iterations take them."""
    samplers = [DistributedSampler(range(length), workers, rank, **options) for rank in range(workers)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return [index for turn in zip(*samplers, strict=True) for index in turn]


def drawn(length, workers, epoch, **options):
    sampler = DistributedSampler(range(length), workers, 0, **options)
    alone = Workers(rank=0, count=workers, host="here", timeout_seconds=1.0)
    order = order_of(DataLoader(range(length), sampler=sampler), alone, seed=0)
    return order.draw(epoch, alone, lambda record: [record]).indices[np.arange(order.length)].tolist()


@pytest.mark.parametrize("shuffle", [True, False], ids=["shuffled", "in order"])
@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8])
def test_with_drop_last_the_order_and_what_is_dropped_are_those_of_torchs_sampler(workers, shuffle):
    options = {"shuffle": shuffle, "seed": 11, "drop_last": True}
    for length, epoch in itertools.product((8, 61, 100, 103), range(3)):
        assert drawn(length, workers, epoch, **options) == dealt(length, workers, epoch, **options)


@pytest.mark.parametrize("workers", [1, 3, 4])
def test_without_drop_last_the_order_is_that_of_torchs_sampler_without_its_padding(workers):
    for length, epoch in itertools.product((12, 61), range(3)):
        assert drawn(length, workers, epoch, seed=5) == dealt(length, workers, epoch, seed=5)[:length]


def test_with_drop_last_every_sample_has_its_turn():
    seen = set().union(*(drawn(61, 8, epoch, drop_last=True) for epoch in range(40)))
    assert seen == set(range(61))


class Shuffled(Sampler):
    """A sampler with a generator of its own."""

    def __init__(self, seed):
        self.generator = random.Random(seed)

    def __len__(self):
        return 61

    def __iter__(self):
        return iter(self.generator.sample(range(61), 61))


def test_a_sampler_that_is_not_seeded_alike_on_all_workers_differs_only_where_they_draw_without_each_other():
    alone = Workers(rank=0, count=2, host="here", timeout_seconds=1.0)
    orders = [order_of(DataLoader(range(61), sampler=Shuffled(seed)), alone, seed=0) for seed in (0, 0, 1)]
    one, same, other = (order.sketch(in_order=True) for order in orders)
    assert one == same != other
    assert len({order.sketch(in_order=False) for order in orders}) == 1
