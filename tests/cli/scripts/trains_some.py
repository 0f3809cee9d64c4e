"""Trains a line for some iterations on every worker; the last argument says what goes wrong in iteration 6.

Worker 1 `raises`, `dies` or `leaves`; worker 0 `exits` with 3, or `closes` its loader and raises then.
"""

import os
import signal
import sys
import time

import support.lean_torch  # noqa: F401
import torch
from torch.utils.data import DataLoader, TensorDataset

import evenstep

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
dataset = TensorDataset(torch.randn(960, 4), torch.randn(960, 1))
model, optimizer, loader = evenstep.prepare(model, optimizer, DataLoader(dataset, batch_size=12))
for inputs, targets in loader:
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    time.sleep(0.002 * len(inputs))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if loader.iteration == 6 and os.environ.get("RANK") == "1":
        if "raises" in sys.argv:
            raise RuntimeError("no more")
        if "dies" in sys.argv:
            os.kill(os.getpid(), signal.SIGKILL)
        if "leaves" in sys.argv:
            sys.exit(0)
    if loader.iteration == 6 and os.environ.get("RANK") == "0":
        if "exits" in sys.argv:
            sys.exit(3)
        if "closes" in sys.argv:
            loader.close()
            raise RuntimeError("no more")
