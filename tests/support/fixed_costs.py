"""Training whose iterations have a large fixed part, as real models do, under one scheme after the other."""

import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import evenstep
from evenstep.core.cluster import parse_cluster

SLOW = """
[disturbances.slow]
kind = "constant"
factor = 3
[[workers]]
[[workers]]
disturb = ["slow"]
"""
STEPS, WIDTH, BATCH = 32, 96, 32


class Recurrent(torch.nn.Module):
    """Its steps follow each other, so one sample takes little less time than sixteen."""

    def __init__(self):
        super().__init__()
        self.memory = torch.nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = torch.nn.Linear(WIDTH, 1)

    def forward(self, inputs):
        return self.head(self.memory(inputs)[0][:, -1])


def train_by_turns(run_dirs, schemes, epochs, iterations):
    """Train under all schemes, an epoch of each in turn; the seconds of all epochs but the first, by scheme.

    There are two workers, one of them made three times slower. What else the machine does slows all schemes alike.
    """
    prepared = [_prepare(f"{run_dirs}/{number}", scheme, iterations) for number, scheme in enumerate(schemes)]
    seconds = [[_epoch(*each) for each in prepared] for _ in range(epochs)]
    for _, _, loader in prepared:
        loader.close()
    return [sum(each) for each in zip(*seconds[1:], strict=True)]


def _prepare(run_dir, scheme, iterations):
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(iterations * BATCH, STEPS, WIDTH), torch.randn(iterations * BATCH, 1))
    model = Recurrent()
    return evenstep.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        DataLoader(dataset, batch_size=BATCH // 2, shuffle=True),
        scheme=scheme,
        emulate=parse_cluster(SLOW),
        run_dir=run_dir,
    )


def _epoch(model, optimizer, loader):
    dist.barrier()
    began = time.perf_counter()
    for inputs, targets in loader:
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.barrier()
    return time.perf_counter() - began
