"""Replicas that come and go without a restart: an ordinary script with two small changes.

    evenstep run --elastic 1:3 --slow 2=4x examples/elastic.py

Kill one of its processes while it runs: the others go on with the same global batch, and it comes back.
"""

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import evenstep

torch.manual_seed(0)
radius, arm = 5 * torch.rand(48_000), torch.randint(3, (48_000,))  # points on three spirals: which one is each on?
angle = radius + arm * 2 * torch.pi / 3 + 0.2 * torch.randn(48_000)
points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
model = torch.nn.Sequential(torch.nn.Linear(2, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256), torch.nn.ReLU())
model.append(torch.nn.Linear(256, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
loader = DataLoader(TensorDataset(points, arm), batch_size=200, shuffle=True)
model, optimizer, loader = evenstep.prepare(model, optimizer, loader, schedulers=scheduler)
for epoch in range(loader.epoch, 6):  # A replica that joins begins in the epoch of the others.
    for inputs, targets in loader:
        loss = cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    scheduler.step()
    with torch.no_grad():
        loss = cross_entropy(model(points), arm)  # Of all points: the same on each replica.
    print(f"epoch {epoch + 1}: loss {loss.item():.4f}, batch sizes {loader.batch_sizes}")
