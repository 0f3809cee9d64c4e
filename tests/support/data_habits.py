"""Datasets, samplers and loaders as scripts bring them; each hands out numbers, which say which samples were used."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

import evenstep
from evenstep.schemes import Scheme
from evenstep.testing.scripted import Scripted
from support.processes import CONTEXT


class Numbers(Dataset):
    """Sample i is the number i."""

    def __init__(self, length):
        self.length = length
        self.offset = 0

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.tensor([float(index + self.offset)])


class Nested(Numbers):
    def __getitem__(self, index):
        return {"pair": (super().__getitem__(index), index), "inner": {"name": f"n{index}", "numbers": [float(index)]}}


@dataclass
class Batch:
    """A batch that is an object of the script's own."""

    numbers: torch.Tensor


def into_objects(samples):
    return Batch(torch.stack(samples))


def shift(worker):
    """A worker_init_fn that sets up its process's dataset."""
    get_worker_info().dataset.offset = 1000


def read(shard):
    first, length = shard
    return iter(range(first, first + length))


def as_tensor(number):
    return torch.tensor([float(number)])


def sharded(**options):
    shards = [(0, 9), (9, 0), (9, 14), (23, 11)]
    return evenstep.ShardedDataset(shards, [length for _, length in shards], read, transform=as_tensor, **options)


def seeded():
    return torch.Generator().manual_seed(5)


def place():
    """As a script under torchrun has it; of one process, where the tests look at what is in the table."""
    return (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)


def loaders():
    """By name: a loader, and what one epoch of it holds."""
    numbers = Numbers(34)
    processes = {"num_workers": 2, "multiprocessing_context": CONTEXT}
    return {
        "in order": (DataLoader(numbers, batch_size=3), range(34)),
        "a generator": (DataLoader(numbers, batch_size=3, shuffle=True, generator=seeded()), range(34)),
        "fewer samples than a global batch": (DataLoader(Numbers(7), batch_size=3, shuffle=True), range(7)),
        "fewer samples than workers": (DataLoader(Numbers(2), batch_size=3, shuffle=True), range(2)),
        "drop_last": (DataLoader(numbers, batch_size=3, drop_last=True), range(27)),
        "a subset": (DataLoader(Subset(numbers, range(5, 25)), batch_size=3, shuffle=True), range(5, 25)),
        "SubsetRandomSampler": (DataLoader(numbers, 3, sampler=SubsetRandomSampler(range(5, 25))), range(5, 25)),
        "WeightedRandomSampler": (
            DataLoader(numbers, 3, sampler=WeightedRandomSampler([0.0] * 14 + [1.0] * 20, 20, replacement=False)),
            range(14, 34),
        ),
        "DistributedSampler": (DataLoader(numbers, 3, sampler=DistributedSampler(numbers, *place())), range(34)),
        "nested batches": (DataLoader(Nested(34), batch_size=3, shuffle=True), range(34)),
        "objects": (
            DataLoader(numbers, batch_size=3, shuffle=True, collate_fn=into_objects, pin_memory=True),
            range(34),
        ),
        "processes that persist": (
            DataLoader(numbers, batch_size=3, shuffle=True, persistent_workers=True, **processes),
            range(34),
        ),
        "worker_init_fn": (
            DataLoader(numbers, batch_size=3, collate_fn=into_objects, worker_init_fn=shift, **processes),
            range(1000, 1034),
        ),
        "shards": (DataLoader(sharded(), batch_size=3, shuffle=True), range(34)),
        "shards in processes": (DataLoader(sharded(keep=1), batch_size=3, shuffle=True, **processes), range(34)),
        "a batch sampler": (DataLoader(numbers, batch_sampler=BatchSampler(range(34), 3, False)), range(34)),
    }


def numbers_of(batch):
    if isinstance(batch, Batch):
        batch = batch.numbers
    elif isinstance(batch, dict):
        numbers, again = batch["pair"]
        assert batch["inner"]["name"] == [f"n{number}" for number in again]
        assert batch["inner"]["numbers"][0].tolist() == again.tolist()
        batch = numbers
    return batch


def visit(epochs):
    """By name: the numbers of each epoch that this worker was given, by iteration."""
    return {name: visit_one(loader, epochs) for name, (loader, _) in loaders().items()}


def visit_one(loader, epochs):
    model = torch.nn.Linear(1, 1)
    scheme = Scheme(name="scripted", load=Scripted(seed=3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    model, optimizer, loader = evenstep.prepare(model, optimizer, loader, scheme=scheme, timeout=20.0)
    with loader:
        seen = []
        for _ in range(epochs):
            seen.append([])
            for batch in loader:
                numbers = numbers_of(batch)
                model(numbers).sum().backward()
                seen[-1].append(numbers[: loader.current.samples].flatten().tolist())
        return seen
