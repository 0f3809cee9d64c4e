"""Trains a classifier with momentum, on images of ten kinds; each worker returns what it reached."""

import torch
from torch.utils.data import DataLoader, TensorDataset

import evenstep

KINDS, PIXELS, IMAGES = 10, 64, 1200


def images():
    """Noisy copies of ten patterns, and which."""
    generator = torch.Generator().manual_seed(5)
    kinds = torch.randint(KINDS, (IMAGES,), generator=generator)
    patterns = torch.rand(KINDS, PIXELS, generator=generator)
    return patterns[kinds] + 0.4 * torch.randn(IMAGES, PIXELS, generator=generator), kinds


def train(scheme, cluster, *, epochs=4, lr=0.2):
    """The loss over all images in the end, and the sizes that this worker computed on."""
    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Linear(PIXELS, 64), torch.nn.ReLU(), torch.nn.Linear(64, KINDS))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    inputs, kinds = images()
    loader = DataLoader(TensorDataset(inputs, kinds), batch_size=32, shuffle=True)
    model, optimizer, loader = evenstep.prepare(model, optimizer, loader, scheme=scheme, emulate=cluster, seed=3)
    sizes = []
    for _ in range(epochs):
        for batch, wanted in loader:
            loss = torch.nn.functional.cross_entropy(model(batch), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sizes.append(loader.current.samples)
    with torch.no_grad():
        return float(torch.nn.functional.cross_entropy(model(inputs), kinds)), sizes
