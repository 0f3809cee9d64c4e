"""A script that trains a line for one iteration, with plain DDP or with evenstep, and writes down when it was done."""

import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

kind, out = sys.argv[1:]
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
    done = done or time.time()
if os.environ["RANK"] == "0":
    Path(out).write_text(repr(done), encoding="utf-8")
if kind == "ddp":
    torch.distributed.barrier()
    os._exit(0)  # Gloo's threads now and then abort a process that ends at once in the ordinary way.
loader.close()
