"""Loaders that scripts change between epochs, and samplers that cut by rank under names of their own."""

import torch
from torch.utils.data import DataLoader, DistributedSampler, Sampler, SubsetRandomSampler, default_collate
from torch.utils.data import WeightedRandomSampler as Weighted

import evenstep
from evenstep.schemes import Scheme
from evenstep.testing.scripted import Scripted
from support.data_habits import Numbers, place
from support.processes import CONTEXT

WORKERS = 3
REFUSED_BY_TORCH = {"batch_size": 4, "dataset": Numbers(5), "sampler": range(4), "drop_last": True}
"""Attributes of a DataLoader that no script may set."""


def negated(samples):
    return -default_collate(samples)


def _lengthen(to):
    def change(loader):
        loader.dataset.length = to

    return change


def _choose(loader):
    loader.sampler.indices = list(range(10, 34))


def _leave(loader):
    pass


def _double(loader):
    loader.batch_sampler.batch_size = 6


def _negate(loader):
    loader.collate_fn = negated


class Turns(Sampler):
    """Gives other samples each time, and knows itself how often it was asked."""

    def __init__(self, *turns):
        self.turns = turns
        self.turn = 0

    def __iter__(self):
        self.turn += 1
        return iter(self.turns[self.turn - 1])

    def __len__(self):
        return len(self.turns[self.turn])


def changes():
    """By name: a loader, what is done to it after the first epoch, and what both epochs hold."""
    processes = {"num_workers": 2, "multiprocessing_context": CONTEXT}
    return {
        "a dataset grows": (DataLoader(Numbers(20), 3, shuffle=True), _lengthen(34), range(20), range(34)),
        "a dataset grows in processes": (
            DataLoader(Numbers(20), 3, shuffle=True, **processes),
            _lengthen(34),
            range(20),
            range(34),
        ),
        "a dataset shrinks": (DataLoader(Numbers(34), 3), _lengthen(11), range(34), range(11)),
        "a sampler grows": (
            DataLoader(Numbers(34), 3, sampler=SubsetRandomSampler(range(10))),
            _choose,
            range(10),
            range(10, 34),
        ),
        "a sampler counts for itself": (
            DataLoader(Numbers(34), 3, sampler=Turns(range(20), range(10, 34), ())),
            _leave,
            range(20),
            range(10, 34),
        ),
        "the batch size doubles": (DataLoader(Numbers(34), 3, shuffle=True), _double, range(34), range(34)),
        "another collate_fn": (DataLoader(Numbers(34), 3), _negate, range(34), range(0, -34, -1)),
        "another collate_fn in processes": (
            DataLoader(Numbers(34), 3, **processes),
            _negate,
            range(34),
            range(0, -34, -1),
        ),
    }


class Part(Sampler):
    """Gives each worker its part, and calls rank and number of workers as nobody else does."""

    def __init__(self, length):
        self.length = length
        self._nodes, self._node = place()

    def __iter__(self):
        return iter(range(self._node, self.length, self._nodes))

    def __len__(self):
        return len(range(self._node, self.length, self._nodes))


class Around(Sampler):
    """A batch sampler around a sampler that cuts by rank, under a name of its own."""

    batch_size = 4

    def __init__(self, base):
        self.base = base

    def __iter__(self):
        indices = list(self.base)
        return (indices[at : at + 4] for at in range(0, len(indices), 4))

    def __len__(self):
        return -(-len(self.base) // 4)


def samplers_by_rank():
    """By name: a loader of which each worker would have another part."""
    workers, rank = place()
    numbers = Numbers(36)
    torch.manual_seed(rank)  # As of a script that seeds each worker in another way.
    return {
        "names of its own": DataLoader(numbers, 3, sampler=Part(36)),
        "around one that is cut": DataLoader(numbers, batch_sampler=Around(DistributedSampler(numbers, workers, rank))),
        "a part of the indices": DataLoader(numbers, 3, sampler=SubsetRandomSampler(list(range(36))[rank::workers])),
        "from the second epoch on": DataLoader(numbers, 3, sampler=Turns(range(36), range(rank, 36, workers), ())),
        "weights drawn by each": DataLoader(numbers, 3, sampler=Weighted(torch.rand(36), 18)),
    }


def visit():
    """What each worker was given and saw, by name, and the sentences of loaders that are refused."""
    found = {name: _visited(loader, change) for name, (loader, change, *_) in changes().items()}
    for name, loader in samplers_by_rank().items():
        try:
            _visited(loader, lambda _: None)
            found[name] = "was trained"
        except evenstep.EvenstepError as error:
            found[name] = str(error)
    return found


def grow_apart():
    """What is said where one worker's dataset grows alone."""

    def change(loader):
        loader.dataset.length += place()[1]

    try:
        return _visited(DataLoader(Numbers(20), 3), change)
    except evenstep.EvenstepError as error:
        return str(error)


def _visited(loader, change):
    """The numbers of two epochs, by iteration, and the lengths that were said before each."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    model, optimizer, loader = evenstep.prepare(
        model, optimizer, loader, scheme=Scheme(name="scripted", load=Scripted(seed=3)), timeout=20.0
    )
    with loader:
        seen, lengths = [], []
        for _ in range(2):
            lengths.append(len(loader))
            seen.append([])
            for numbers in loader:
                model(numbers).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                seen[-1].append(numbers[: loader.current.samples].flatten().tolist())
            change(loader)
        return seen, lengths
