"""Trains for ever; each worker says its name once it is in the midst of it."""

import os

import support.lean_torch  # noqa: F401
import torch
from torch.utils.data import DataLoader, TensorDataset

import evenstep

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
dataset = TensorDataset(torch.randn(240, 4), torch.randn(240, 1))
model, optimizer, loader = evenstep.prepare(model, optimizer, DataLoader(dataset, batch_size=4))
steps = 0
while True:
    for inputs, targets in loader:
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
        if steps == 20:
            os.write(1, f"worker {os.environ['RANK']}\n".encode())
