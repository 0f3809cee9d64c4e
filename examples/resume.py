"""Trains on handwritten digits, saves as it goes, and resumes from the last checkpoint wherever it was stopped."""

import argparse
import os

import torch
from sklearn.datasets import load_digits
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

import evenstep


def digits():
    data = load_digits()
    images, labels = torch.tensor(data.images).float().unsqueeze(1) / 16, torch.tensor(data.target)
    return TensorDataset(images[360:], labels[360:]), images[:360], labels[:360]


def network():
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 64, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(64, 64, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Dropout(0.2),
        torch.nn.Flatten(),
        torch.nn.Linear(64 * 4 * 4, 10),
    )


@torch.no_grad()
def accuracy(model, images, labels):
    model.eval()
    right = (model(images).argmax(dim=1) == labels).float().mean().item()
    model.train()
    return right


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--global-batch-size", type=int, default=128, help="over all workers, however many they are")
    parser.add_argument("--checkpoints", default="checkpoints", help="a folder that all workers see")
    parser.add_argument("--save-every", type=int, default=5, help="iterations")
    options = parser.parse_args()
    first = os.environ.get("RANK", "0") == "0"

    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = CosineAnnealingLR(optimizer, options.epochs)
    dataset, test_images, test_labels = digits()
    loader = DataLoader(dataset, batch_size=32, shuffle=True)
    model, optimizer, loader = evenstep.prepare(
        model, optimizer, loader, global_batch_size=options.global_batch_size, timeout=30
    )
    extras = {"scheduler": scheduler}
    found = evenstep.checkpoint.restore(options.checkpoints, model, optimizer, loader, extras=extras)
    if first:
        print(f"from {found or 'the beginning'}, in epoch {loader.epoch + 1}")

    for epoch in range(loader.epoch, options.epochs):
        for images, labels in loader:
            loss = functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if loader.iteration % options.save_every == 0:
                evenstep.checkpoint.save(options.checkpoints, model, optimizer, loader, extras=extras)
        scheduler.step()
        if first:
            print(f"epoch {epoch + 1}: test accuracy {accuracy(model, test_images, test_labels):.1%}")


if __name__ == "__main__":
    main()
