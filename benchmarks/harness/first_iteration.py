"""A script that trains a line for one iteration, with plain DDP or with evenstep, and writes down when it was done.

Beside that, the CPU seconds that led there: those of this process and of the processes that started it.
"""

import json
import os
import sys
import time
from pathlib import Path

import psutil
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

kind, measures, out = sys.argv[1:]


def cpu_seconds():
    """Of this process and of those between it and the one that measures."""
    processes = [psutil.Process(), *psutil.Process().parents()]
    led = processes[: [each.pid for each in processes].index(int(measures))]
    return sum(times.user + times.system for times in (each.cpu_times() for each in led))


torch.manual_seed(0)
model = torch.nn.Linear(64, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
dataset = TensorDataset(torch.randn(256, 64))
if kind == "ddp":
    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
    loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset))
else:
    import evenstep

    loader = DataLoader(dataset, batch_size=8, shuffle=True)
    model, optimizer, loader = evenstep.prepare(model, optimizer, loader)
done = None
for (inputs,) in loader:
    loss = model(inputs).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    done = done or (time.time(), cpu_seconds())
if os.environ["RANK"] == "0":
    Path(out).write_text(json.dumps(done), encoding="utf-8")
if kind == "ddp":
    torch.distributed.barrier()
    os._exit(0)  # Gloo's threads now and then abort a process that ends at once in the ordinary way.
loader.close()
