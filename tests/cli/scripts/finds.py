"""Trains an epoch, with the global batch that was found if asked to; a second argument limits its addresses, in MB."""

import resource
import sys

import support.lean_torch  # noqa: F401
import torch
from torch.utils.data import DataLoader, TensorDataset

import evenstep

torch.manual_seed(0)
WIDE = 2**17  # Numbers for each sample after the first layer: 512 kB, three times in a training step.
model = torch.nn.Sequential(torch.nn.Linear(1, WIDE), torch.nn.ReLU(), torch.nn.Linear(WIDE, 1, bias=False))
if len(sys.argv) > 2:
    torch.nn.functional.mse_loss(model(torch.zeros(2, 1)), torch.zeros(2, 1)).backward()
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    limit = taken + int(sys.argv[2]) * 10**6
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
dataset = TensorDataset(torch.randn(600, 1), torch.randn(600, 1))
options = {"cost": evenstep.Padded(range(1, 601))} if "padded" in sys.argv[1] else {}
size = {"global_batch_size": "auto"} if "auto" in sys.argv[1] else {}
loader = DataLoader(
    dataset,
    batch_size=300,
    shuffle=True,
    collate_fn=lambda rows: [torch.stack(each) for each in zip(*rows, strict=True)],
)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
model, optimizer, loader = evenstep.prepare(model, optimizer, loader, **options, **size)
for inputs, targets in loader:
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if loader.current.samples:
        print(f"sizes {loader.batch_sizes} of {loader.global_batch_size}\n", end="")
loader.close()
