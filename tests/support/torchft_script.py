"""A script for torchft with a `Manager` of its own, as torchft's README shows it; tests adopt evenstep in it."""

import sys

import torch
from torch.utils.data import DataLoader, TensorDataset
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

torch.manual_seed(0)
inputs = torch.randn(240, 4)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=12, shuffle=True)
manager = Manager(
    pg=ProcessGroupGloo(),
    load_state_dict=model.load_state_dict,
    state_dict=model.state_dict,
    min_replica_size=2,
)
model = DistributedDataParallel(manager, model)
optimizer = Optimizer(manager, optimizer)
for _ in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
print("steps", manager.current_step(), "weight", float(next(model.parameters()).sum()), flush=True)
sys.exit()
