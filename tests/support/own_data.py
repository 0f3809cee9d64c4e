"""Workers with a dataset each, for `run_workers`."""

import copy
import io

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


LENGTHS = (23, 8, 3)


def private_rows(rank, length):
    """Samples whose last value says whose they are, and which."""
    values = torch.randn(length, 3, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    return TensorDataset(torch.arange(length), values)


def federated_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()


def step(model, optimizer, values):
    optimizer.zero_grad()
    ((model(values[:, :3]) - values.sum(1, keepdim=True)) ** 2).mean().backward()
    optimizer.step()


def train_private(scheme, epochs, options):
    """This worker's sample numbers by epoch and iteration, the weights, and the state after `stop` iterations."""
    rank, state, stop = dist.get_rank(), options.get("state"), options.get("stop")
    dataset = private_rows(rank, LENGTHS[rank])
    model = federated_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=options.get("momentum", 0.0))
    loader = DataLoader(dataset, batch_size=2, shuffle=True, num_workers=options.get("processes", 0))
    model, optimizer, loader = evenstep.prepare(
        model, optimizer, loader, scheme=scheme, partition="private", seed=5, run_dir=options.get("run_dir")
    )
    with loader:
        if state is not None:
            of_loader, tensors = state
            loader.load_state_dict(of_loader)
            of_model, of_optimizer = torch.load(io.BytesIO(tensors))
            model.module.load_state_dict(of_model)
            optimizer.load_state_dict(of_optimizer)
        seen, kept = [], None
        for _ in range(epochs):
            numbers = []
            for index, values in loader:
                numbers.append(index[: loader.current.samples].tolist())
                step(model, optimizer, values)
                if stop is not None and len(numbers) == stop and not seen:
                    loader.settle()
                    kept = loader.state_dict(), saved((model.module.state_dict(), optimizer.state_dict()))
            seen.append(numbers)
        return {"seen": seen, "weights": weights(model.module), "state": kept, "length": len(loader)}


def saved(states):
    """As bytes: tensors would go between processes through files of the one that sends them."""
    file = io.BytesIO()
    torch.save(states, file)
    return file.getvalue()


def weights(model):
    return torch.cat([each.detach().flatten() for each in model.parameters()]).tolist()


def train_federated(seen, rounds):
    """FedAvg in one process: every round each client trains on its batches, then w <- sum of (n_i / n) w_i.

    `seen`: of each client, the sample numbers by round and step. `rounds`: steps in each round, alike for all.
    """
    whole, total = federated_model(), sum(LENGTHS)
    for each in range(rounds):
        clients = []
        for rank, numbers in enumerate(seen):
            model = copy.deepcopy(whole)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            _, values = private_rows(rank, LENGTHS[rank]).tensors
            for batch in numbers[each]:
                if batch:
                    step(model, optimizer, values[batch])
            clients.append(model)
        with torch.no_grad():
            for mean, *parts in zip(whole.parameters(), *(client.parameters() for client in clients), strict=True):
                mean.copy_(sum(n / total * part for n, part in zip(LENGTHS, parts, strict=True)))
    return weights(whole)


def refused(cases):
    """The sentences with which workers refuse private data: by scheme, options of the loader, and others."""
    told = []
    for scheme, of_loader, options in cases:
        loader = DataLoader(rows(dist.get_rank()), **{"batch_size": 2, **of_loader})
        try:
            evenstep.prepare(*parts(), loader, **{"scheme": scheme, "partition": "private", **options})[2].close()
            told.append(None)
        except evenstep.EvenstepError as error:
            told.append(str(error))
    return told


def resume_elsewhere(state):
    """What a state of private data is told in a run with a common dataset."""
    with evenstep.prepare(*parts(), DataLoader(rows(0), batch_size=2), scheme="local-sgd")[2] as loader:
        try:
            loader.load_state_dict(state)
        except evenstep.EvenstepError as error:
            return str(error)
