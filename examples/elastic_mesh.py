"""Replicas of two processes each that come and go without a restart: the model is split by tensor parallelism.

    evenstep run --elastic 1:2 --nproc-per-replica 2 --slow 1=3x examples/elastic_mesh.py

Kill one of its processes while it runs: the others go on with the same global batch, and its replica comes back.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

import evenstep

dist.init_process_group("gloo")  # Of this replica alone.
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
torch.manual_seed(0)
inputs = torch.randn(10_000, 64)
dataset = TensorDataset(inputs, inputs.sin())
model = torch.nn.Sequential(torch.nn.Linear(64, 4096), torch.nn.Tanh(), torch.nn.Linear(4096, 64))
parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(dataset, batch_size=256, shuffle=True)
model, optimizer, loader = evenstep.prepare(model, optimizer, loader, mesh=mesh)
for epoch in range(loader.epoch, 12):  # A replica that joins begins in the epoch of the others.
    for inputs, targets in loader:
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, batch sizes {loader.batch_sizes}")
