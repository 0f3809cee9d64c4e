"""Trains a line for some iterations on every worker; the last argument says what worker 1 does in iteration 6."""

import os
import signal
import sys
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import evenstep

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
dataset = TensorDataset(torch.randn(480, 4), torch.randn(480, 1))
model, optimizer, loader = evenstep.prepare(model, optimizer, DataLoader(dataset, batch_size=12))
for inputs, targets in loader:
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    time.sleep(0.001 * len(inputs))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if loader.iteration == 6 and os.environ.get("RANK") == "1":
        if "raises" in sys.argv:
            raise RuntimeError("no more")
        if "dies" in sys.argv:
            os.kill(os.getpid(), signal.SIGKILL)
