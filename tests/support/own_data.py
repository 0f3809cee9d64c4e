"""Workers with a dataset each, for `run_workers`."""

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, TensorDataset

import evenstep


class Noisy(Dataset):
    """A random number of its own generator in each sample: samples say nothing of the dataset."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.tensor([np.random.default_rng().random()])


class Augmented(Dataset):
    """Draws from the global generators."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.full((8,), float(index)) + torch.randn(8)


def rows(rank):
    """12 samples of this rank's own."""
    return TensorDataset(torch.randn(12, 3, generator=torch.Generator().manual_seed(rank)))


def parts():
    model = torch.nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def start(kind, partition=None, scheme="bsp"):
    """What a worker is told that starts with such a dataset: the sentence, or None."""
    rank = dist.get_rank()
    torch.manual_seed(rank)  # What the script itself draws must not matter.
    dataset = {"own": lambda: rows(rank), "common": lambda: rows(0), "noisy": Noisy, "augmented": Augmented}[kind]()
    given, before = parts(), torch.get_rng_state()
    try:
        loader = DataLoader(dataset, batch_size=2)
        with evenstep.prepare(*given, loader, scheme=scheme, partition=partition)[2]:
            return None if torch.equal(before, torch.get_rng_state()) else "numbers were drawn"
    except evenstep.EvenstepError as error:
        return str(error)


def start_all(cases):
    """As `start`, for each of the cases in turn."""
    return [start(*case) for case in cases]


def start_with_second_loader():
    """The second loader's dataset is this worker's own."""
    with evenstep.Session("bsp") as session:
        model, optimizer = parts()
        model, optimizer = session.model(model), session.optimizer(optimizer)
        session.loader(DataLoader(rows(0), batch_size=2))
        second = session.loader(DataLoader(rows(dist.get_rank()), batch_size=2))
        try:
            session.start()
        except evenstep.EvenstepError as error:
            return str(error)
        return len(second)
