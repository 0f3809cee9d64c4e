"""Trains; some workers meet a fault in their first life: `meets_faults.py TIMEOUT FAULT...`, with a fault for each.

A fault is `none` or `MOMENT:WHAT`. The moment is `start` or `middle`. WHAT is a signal, or `exit` or `os._exit` with 0.
"""

import os
import signal
import sys

import support.lean_torch  # noqa: F401
import torch
from torch.utils.data import DataLoader, TensorDataset

import evenstep

TIMEOUT, *FAULTS = sys.argv[1:]
RANK = int(os.environ["RANK"])
MOMENT, _, WHAT = FAULTS[RANK].partition(":")


def meet(moment):
    if moment != MOMENT or os.environ["EVENSTEP_RESTART"] != "0":
        return
    os.write(1, f"worker {RANK} meets {WHAT}\n".encode())
    if WHAT == "os._exit":
        os._exit(0)
    if WHAT == "exit":
        sys.exit(0)
    os.kill(os.getpid(), getattr(signal, WHAT))


meet("start")
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = DataLoader(TensorDataset(torch.randn(800, 4), torch.randn(800, 1)), batch_size=4)
model, optimizer, loader = evenstep.prepare(model, optimizer, data, timeout=float(TIMEOUT))
for _ in range(2):
    for inputs, targets in loader:
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loader.iteration == 9:
            meet("middle")
os.write(1, f"worker {RANK} finished\n".encode())
