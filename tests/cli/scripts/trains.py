"""Trains a line for one epoch; the loader's batch size is the first argument."""

import sys

import support.lean_torch  # noqa: F401
import torch
from torch.utils.data import DataLoader, TensorDataset

import evenstep

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
dataset = TensorDataset(torch.randn(240, 4), torch.randn(240, 1))
model, optimizer, loader = evenstep.prepare(model, optimizer, DataLoader(dataset, batch_size=int(sys.argv[1])))
for inputs, targets in loader:
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
loader.close()
