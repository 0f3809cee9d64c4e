"""PyTorch: a plain loop around `evenstep.prepare`."""

import os

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import evenstep
import support.lean_torch  # noqa: F401
from support.frameworks.task import (
    EPOCHS,
    GLOBAL,
    HIDDEN,
    INPUTS,
    KINDS,
    MOMENTUM,
    RATE,
    SLICES,
    WORKERS,
    data,
    first_weights,
)


def join(rank, addresses):
    host, port = addresses[0].split(":")
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(len(addresses)), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": port}
    torch.set_num_threads(1)


def made(job):
    model = torch.nn.Sequential(torch.nn.Linear(INPUTS, HIDDEN), torch.nn.Tanh(), torch.nn.Linear(HIDDEN, KINDS))
    model = model.to(getattr(torch, job.dtype))
    with torch.no_grad():
        for parameter, first in zip(model.parameters(), first_weights(job.dtype), strict=True):
            parameter.copy_(torch.from_numpy(first.T))
    return model, torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)


def dataset(job):
    inputs, labels = map(torch.from_numpy, data(job.dtype))
    return TensorDataset(inputs, labels.long(), torch.arange(len(labels)))


def step(model, optimizer, inputs, labels):
    optimizer.zero_grad()
    cross_entropy(model(inputs), labels).backward()
    optimizer.step()


def weights_of(model):
    return [each.detach().numpy().T.copy() for each in model.parameters()]


def train(job):
    model, optimizer = made(job)
    loader = DataLoader(dataset(job), batch_size=GLOBAL // WORKERS)
    model, optimizer, loader = evenstep.prepare(model, optimizer, loader, scheme=job.scheme)
    for _ in range(EPOCHS):
        for inputs, labels, indices in loader:
            step(model, optimizer, inputs, labels)
            yield indices[: loader.current.samples], loader.current.sizes
    yield weights_of(model)
    loader.close()


def alone(job):
    model, optimizer = made(job)
    inputs, labels, _ = dataset(job).tensors
    for _ in range(EPOCHS):
        for batch in map(torch.from_numpy, SLICES):
            step(model, optimizer, inputs[batch], labels[batch])
    return weights_of(model)
