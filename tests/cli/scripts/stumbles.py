"""Trains for ever; every third iteration takes 10 ms longer, as where something else takes the processor meanwhile."""

import itertools
import time

import torch
from support import lean_torch  # noqa: F401
from torch.utils.data import DataLoader, TensorDataset

import evenstep


class Stumbling(torch.nn.Linear):
    iterations = itertools.count()

    def forward(self, inputs):
        until = time.perf_counter() + 0.01 * (next(self.iterations) % 3 == 0)
        while time.perf_counter() < until:
            pass
        return super().forward(inputs)


model = Stumbling(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.zeros(64, 4)), batch_size=4)
model, optimizer, loader = evenstep.prepare(model, optimizer, loader)
while True:
    for (inputs,) in loader:
        model(inputs).sum().backward()
        optimizer.step()
