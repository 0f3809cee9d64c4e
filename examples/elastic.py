"""Replicas that come and go without a restart: an ordinary script, and two words more in its loop.

    evenstep run --elastic 1:3 --slow 2=4x examples/elastic.py

Kill one of its processes meanwhile: the others go on with the same global batch, and it comes back.
"""

import torch
from torch.utils.data import DataLoader, TensorDataset

import evenstep

torch.manual_seed(0)
inputs = torch.randn(6_000, 16)
dataset = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True).sin())
model = torch.nn.Sequential(torch.nn.Linear(16, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.8)
loader = DataLoader(dataset, batch_size=32, shuffle=True)
model, optimizer, loader = evenstep.prepare(model, optimizer, loader, schedulers=scheduler)
for epoch in range(loader.epoch, 4):  # A replica that joins begins in the epoch of the others.
    for inputs, targets in loader:
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    scheduler.step()
    print(f"epoch {epoch + 1}: loss {loss.item():.3f}, batch sizes {loader.batch_sizes}")
