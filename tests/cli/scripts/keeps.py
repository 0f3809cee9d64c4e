"""Trains for 120 iterations, and means to keep events and checkpoints in the first argument."""

import sys
from pathlib import Path

import support.lean_torch  # noqa: F401
import torch
from torch.utils.data import DataLoader, TensorDataset

import evenstep

folder = Path(sys.argv[1])
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
dataset = TensorDataset(torch.randn(240, 4), torch.randn(240, 1))
model, optimizer, loader = evenstep.prepare(model, optimizer, DataLoader(dataset, 8), run_dir=folder / "run")
evenstep.checkpoint.restore(folder / "checkpoints", model, optimizer, loader)
for number, (inputs, targets) in enumerate(loader):
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    evenstep.checkpoint.save(folder / "checkpoints", model, optimizer, loader)
    if number == 120:
        break
